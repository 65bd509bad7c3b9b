"""The rules of the embedded engine: the tokens of the next pass, and the free blocks."""
