"""Real text that every machine has: the sources of the Python standard library."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Int32, UInt8

_SHARE = 10  # one file in ten is held back for validation


@dataclass(frozen=True)
class Text:
    """Bytes to train on and bytes to validate on, from different files."""

    train: UInt8[np.ndarray, " n"]
    validation: UInt8[np.ndarray, " m"]


def standard_library(limit: int = 4_000_000) -> Text:
    """The top-level modules of the standard library as bytes, split by file.

    Args:
        limit: bytes to stop at, training and validation together.

    Raises:
        FileNotFoundError: if Python was installed without its sources.
    """
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(folder.glob("*.py"))
    if len(files) < _SHARE:
        raise FileNotFoundError(f"no sources of the standard library in {folder}")
    contents, total = [], 0
    for file in files:
        contents.append(file.read_bytes())
        total += len(contents[-1])
        if total > limit:
            break
    held_back = contents[_SHARE - 1 :: _SHARE]
    del contents[_SHARE - 1 :: _SHARE]
    parts = (np.frombuffer(b"\n".join(p), np.uint8) for p in (contents, held_back))
    return Text(*parts)


def batches(
    text: UInt8[np.ndarray, " n"], batch: int, context: int, seed: int
) -> Iterator[Int32[np.ndarray, "batch length"]]:
    """Endless random crops of `context + 1` bytes: inputs, and targets one further."""
    random = np.random.default_rng(seed)
    window = np.arange(context + 1)
    while True:
        starts = random.integers(0, len(text) - context, size=batch)
        yield text[starts[:, None] + window].astype(np.int32)
