"""Dot product attention in blocks, or by a kernel, in memory linear in the length."""
