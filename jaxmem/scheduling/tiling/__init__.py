"""Regions of a step that run part by part: a layer, a head, a batch in tiles."""
