"""Remote storage through fsspec: addresses, their file systems, and uploads in the background."""
