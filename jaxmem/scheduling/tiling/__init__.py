"""Regions of a step that are worked through in pieces, in loops."""
