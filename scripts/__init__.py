"""What `make` runs before anything is installed: the standard library alone."""
