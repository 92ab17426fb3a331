"""The finders, a kind of fault a file."""
