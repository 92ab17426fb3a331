"""Casts, constants and parameters, moved to where their slices are read."""
