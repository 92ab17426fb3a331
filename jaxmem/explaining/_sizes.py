"""Sizes as XLA, CUDA and Linux print them: all of 1024, with and without a B."""

import re

# one group; `12.5GiB`, `20.1G`, `6291456 bytes`, `0B`, `123kB`
SIZE = r"(\d+(?:\.\d+)? ?[KMGTk]?(?:i?B\b|bytes?\b|\b))"
_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?([KMGTk]?)")
_FACTORS = {"": 1, "k": 2**10, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def size_of(text: str) -> int:
    """The bytes of one such size."""
    match = _SIZE.match(text)
    assert match is not None, text
    return round(float(match[1]) * _FACTORS[match[2]])


def sizes(form: str, text: str) -> list[int]:
    """What the first group of a form is, wherever it is found."""
    return [size_of(match[1]) for match in re.finditer(form, text, re.M)]


def last_size(form: str, text: str) -> int | None:
    """The last of them: a log repeats itself, and its end is what stopped it."""
    found = sizes(form, text)
    return found[-1] if found else None
