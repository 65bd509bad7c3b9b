"""The rules of the embedded engine: which tokens run in the next pass, and which blocks are
free."""
