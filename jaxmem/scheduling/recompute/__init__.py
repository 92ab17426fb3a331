"""Recomputation: what the backward pass makes again instead of reading it."""
