"""Recomputation under a budget: which operations to repeat, and when."""
