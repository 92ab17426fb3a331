"""Recomputation: what the backward pass recomputes instead of reading it."""
