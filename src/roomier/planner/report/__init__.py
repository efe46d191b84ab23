"""Reports of a choice: tables for a terminal and an HTML page."""
