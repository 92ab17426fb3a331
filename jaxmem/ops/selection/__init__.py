"""Ops that keep which element they took: `where` and max-pooling."""
