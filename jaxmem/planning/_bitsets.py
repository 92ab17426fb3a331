"""Sets of small numbers as the bits of one Python integer."""

from collections.abc import Iterable, Iterator


def bitset(members: Iterable[int]) -> int:
    """The set of these numbers."""
    bits = 0
    for member in members:
        bits |= 1 << member
    return bits


def union(sets: Iterable[int]) -> int:
    """The union of sets."""
    bits = 0
    for each in sets:
        bits |= each
    return bits


def members(bits: int) -> Iterator[int]:
    """The numbers in a set, rising."""
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
