"""Booleans packed eight to a byte: rows 8r .. 8r + 7 share the bytes of row r.

XLA's reference, which packs along the second to last axis, has the same layout. Memory
traffic for n elements of b bytes: pack reads n b and writes n/8 bytes; unpack reads n/8
and writes n.
"""


def is_set(x):
    """Whether an element is not zero."""
    return x != 0
