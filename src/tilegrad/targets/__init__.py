"""One folder for each kind of machine."""
