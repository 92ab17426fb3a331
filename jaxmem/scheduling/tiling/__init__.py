"""Tiles: regions of a step that are run in parts, one part after the other."""
