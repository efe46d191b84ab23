"""One folder per technique. A technique imports no other technique; engine/build.py combines them."""
