"""Sizes from which it counts how the threads of a GPU get at bytes."""

SECTOR = 32  # bytes that a GPU fetches at least
LARGE = 2**18  # elements of an array that takes longer than a launch
