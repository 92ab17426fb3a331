"""Sums that XLA runs with few of a GPU's processors."""
