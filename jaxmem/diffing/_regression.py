"""A growth of temporaries as a Python file: which programs are reduced, and by whom."""

from collections.abc import Callable
from pathlib import Path

from jaxmem._bytes import format_bytes
from jaxmem.diffing._program import Program, script
from jaxmem.diffing._reduce import ProgramPair, reduced
from jaxmem.diffing._sides import Side

_NAMES = "before", "after"


def write_reduced(
    before: Side, after: Side, same: bool, path: Path, seconds: float
) -> str:
    """Writes the smallest programs that show the growth; a sentence about them.

    Two versions of jax get the same program, if it grows so: then it is the compiler.
    Else each has traced its own, and the newer one compiles both.
    """
    pair, sizes, how = _programs(before, after, same)
    found = reduced(pair, sizes, seconds)
    one, two = map(format_bytes, (found.before, found.after))
    about = f"with {one} of temporaries before and {two} after"
    small = found.pair.before, found.pair.after
    if small[0] is small[1]:
        texts = {"step": small[0].text()}
    else:
        texts = {n: p.text(n) for n, p in zip(_NAMES, small, strict=True)}
    text = script(f"{how}, {about}.", texts)
    path.write_text(text, encoding="utf-8")
    lines = len(text.splitlines())
    left = (
        "" if found.finished else "; reduce_seconds were over, it is not the smallest"
    )
    return f"{path}: {lines} lines of plain JAX. {how}, {about}{left}"


def _programs(
    before: Side, after: Side, same: bool
) -> tuple[ProgramPair, Callable[[tuple[str, str]], tuple[int, int]], str]:
    versions = before.version(), after.version()
    if same and (text := _grows(before, after)):
        one = Program.of_text(text)
        how = f"One program, compiled by jax {versions[0]} and jax {versions[1]}"
        return ProgramPair(one, one), _compiled_by(before, after), how
    pair = ProgramPair(*(Program.of_text(side.program()) for side in (before, after)))
    if not same:
        return pair, _compiled_by(before, after), "Two programs"
    how = f"One step as jax {versions[0]} and jax {versions[1]} trace it"
    return pair, _compiled_by(after, after), how


def _grows(before: Side, after: Side) -> str:
    """The program of one side that takes more after; "" if none does."""
    for side in (after, before):
        text = side.program()
        try:
            sizes = _compiled_by(before, after)((text, text))
        except RuntimeError:  # functions that the other version of jax does not have
            continue
        if sizes[1] > sizes[0]:
            return text
    return ""


def _compiled_by(*sides: Side) -> Callable[[tuple[str, str]], tuple[int, int]]:
    """Temporaries of two programs, each as a side of its own compiles it."""

    def sizes(texts: tuple[str, str]) -> tuple[int, int]:
        begun = [s.temp_bytes(text) for s, text in zip(sides, texts, strict=True)]
        one, two = [size() for size in begun]
        return one, two

    return sizes
