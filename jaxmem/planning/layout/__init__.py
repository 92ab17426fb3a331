"""Offsets for buffers in one arena, and the buffers themselves."""
