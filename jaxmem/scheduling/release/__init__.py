"""Gradient release: updates are moved into the backward scan, layer by layer."""
