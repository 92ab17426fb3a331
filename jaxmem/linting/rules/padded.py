"""Arrays that a TPU's tiles make several times as large as their elements."""

import math
from collections.abc import Iterator

import jax

from jaxmem._bytes import format_bytes
from jaxmem.linting._subject import LEAST, Finding, Subject
from jaxmem.memory.buffers import (
    Hlo,
    Instruction,
    PaddedAxis,
    PeakBuffer,
    arrays_of,
    buffers_at_peak,
    padded_axes,
    parse_hlo,
)

_TIMES = 2  # its own bytes: heads of 64 in lanes of 128 take as much
_SHARE = 0.01  # of the peak
_THREEFRY = "jax_threefry_partitionable"
# what jax.random calls its functions, in the names of operations
_RANDOM = ("uniform", "normal", "random_bits", "iota_2x32", "erf_inv", "randint")


def padded(subject: Subject) -> Iterator[Finding]:
    """Finds arrays at the peak that are mostly padding, in a step compiled for a TPU.

    The compiler chooses each array's layout, and only the compiled step tells it. Most
    arrays with a short axis are not padded: it puts a long one last. It cannot where a
    reshape merges the short axis with others.
    """
    compiled = subject.compiled
    if compiled is None or ":T(" not in compiled.assignment:
        return
    names = [subject.call.leaves[i].name for i in compiled.used]
    texts = compiled.hlo, compiled.assignment, compiled.live_range
    rows = buffers_at_peak(*texts, compiled.temp_bytes, names)
    least = max(LEAST, _SHARE * sum(row.bytes for row in rows))
    hlo = parse_hlo(compiled.hlo)
    for row in rows:
        axes = padded_axes(row.shape, row.layout)
        if row.padding >= least and row.bytes > _TIMES * row.unpadded_bytes and axes:
            yield _finding(row, axes[0], hlo)


def _finding(row: PeakBuffer, worst: PaddedAxis, hlo: Hlo) -> Finding:
    merged = _merged_by(row, hlo) if row.kind == "temp" else None
    read = f", for a reshape to {_axes(_sizes(merged))}" if merged else ""
    where = f"{row.source} ({row.function})" if row.source else ""
    if row.kind == "argument":
        where = row.name
    elif merged and not where:
        where = hlo.source(merged)
    return Finding(
        check="padded",
        severity="warning",
        what=f"{row.dtype}{_axes(row.shape)} takes {format_bytes(row.bytes)} on a TPU, "
        f"{row.bytes / row.unpadded_bytes:.3g} times its elements: its axis of "
        f"{worst.size} is padded to {worst.padded}{read}",
        bytes=row.padding,
        where=where,
        path=row.module_path,
        remedy=_remedy(row, worst, _sizes(merged) if merged else ()),
    )


def _merged_by(row: PeakBuffer, hlo: Hlo) -> Instruction | None:
    """The reshape that reads an array and merges its axes, if one does."""
    for name in hlo.readers.get(row.name, ()):
        made = hlo.instruction(name)
        if made is not None and made.opcode == "reshape":
            return made
    return None


def _remedy(row: PeakBuffer, worst: PaddedAxis, merged: tuple[int, ...]) -> str:
    others = [n for axis, n in enumerate(row.shape) if axis != worst.axis]
    if math.prod(others) == 1 or worst.size == 1:
        return f"drop the axis: {_axes(others)} in place of {_axes(row.shape)}"
    first = _axes([worst.size, *others])
    if not merged:
        return f"keep a long axis last: {first} in place of {_axes(row.shape)}"
    if any(name in row.operation for name in _RANDOM):
        return _of_random(row, merged)
    long = math.prod(others)
    if len(merged) > 1 and worst.axis == len(row.shape) - 1 and not long % merged[0]:
        rows = _axes([merged[0], long // merged[0], worst.size])
        return f"have it as {rows} before the reshape to {_axes(merged)}"
    return (
        f"have it as {first}, with a long axis last, where its elements may be in that "
        "order: jnp.stack or jnp.concatenate along axis 0, not along the last"
    )


def _of_random(row: PeakBuffer, merged: tuple[int, ...]) -> str:
    if not getattr(jax.config, _THREEFRY):
        return (
            f"jax.config.update({_THREEFRY!r}, True): jax.random then makes the shape "
            "that it is given, and reshapes nothing (its numbers are others)"
        )
    return (
        f"give jax.random the shape {_axes(merged)} itself, in place of "
        f"{_axes(row.shape)} and a reshape"
    )


def _sizes(made: Instruction) -> tuple[int, ...]:
    return arrays_of(made.shape)[0].sizes


def _axes(sizes) -> str:
    return f"[{','.join(map(str, sizes))}]"
