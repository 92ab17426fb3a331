"""What to do about the largest buffers, where it is certain what helps."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from jaxmem._bytes import format_bytes
from jaxmem._module_path import merge_numbered
from jaxmem.memory.buffers.attribute import CURVES, DONATED
from jaxmem.memory.buffers.rows import PeakBuffer

_LEAST = 0.01  # of the peak: causes below it get no line
_SQUARE = 64  # the length from which two equal axes are taken for attention scores


def advise(
    at_peak: Iterable[PeakBuffer], curved: Collection[tuple[str, str]] = ()
) -> tuple[str, ...]:
    """One line for each cause that `jaxmem.substitute` removes, largest first."""
    at_peak = tuple(at_peak)
    least = _LEAST * sum(h.bytes for h in at_peak)
    weights = _weights(at_peak)
    by_cause: dict[str, list[PeakBuffer]] = defaultdict(list)
    curves = _curve_places(at_peak, curved)
    scores = {h.shape for h in at_peak if _is_square(h) and _innermost(h) == "exp"}
    for h in at_peak:
        plain = h.kind == "temp" and h.shape and "jaxmem." not in h.module_path
        if plain and (cause := _cause(h, weights, curves, scores)):
            by_cause[cause].append(h)
    causes = sorted(by_cause.items(), key=lambda item: -_total(item[1]))
    return tuple(_LINES[c](hs) for c, hs in causes if _total(hs) >= least)


def _weights(at_peak: Collection[PeakBuffer]) -> set[tuple[int, ...]]:
    """Shapes of arguments that the step updates, and of a layer of them.

    A batch is no such argument, and its activations may have its shape.
    """
    outputs = {h.shape for h in at_peak if h.kind == "output"}
    updated = {
        h.shape
        for h in at_peak
        if h.kind == "argument" and (h.name.endswith(DONATED) or h.shape in outputs)
    }
    return updated | {shape[1:] for shape in updated}


def _cause(buffer: PeakBuffer, weights: set, curves: set, scores: set) -> str:
    operation = _innermost(buffer)
    named = f"{buffer.module_path} {buffer.function} {buffer.operation}".lower()
    says_so = "attention" in named or "attn" in named or "softmax" in named
    if _is_square(buffer) and (says_so or buffer.shape in scores):
        return "attention"
    if buffer.dtype == "bool" and operation == "lt" and "bernoulli" in buffer.operation:
        return "dropout"
    if _place(buffer) in curves:
        return "activation"
    if operation == "convert_element_type" and buffer.shape in weights:
        return "weights"
    return ""


def _innermost(buffer: PeakBuffer) -> str:
    return buffer.operation.rsplit("/", 1)[-1]


def _is_square(buffer: PeakBuffer) -> bool:
    """Whether its shape is [..., heads, S, S]; stacked weights have fewer axes."""
    shape = buffer.shape
    return len(shape) >= 4 and shape[-1] == shape[-2] >= _SQUARE


def _curve_places(at_peak: Iterable[PeakBuffer], curved: Collection) -> set:
    """Places that compute one of `CURVES` and have several buffers of one type."""
    places = defaultdict(list)
    for h in at_peak:
        if h.kind == "temp" and h.source and "dot_general" not in h.operation:
            places[_place(h)].append(_innermost(h))
    return {
        place
        for place, operations in places.items()
        if len(operations) > 1 and (place[1:] in curved or CURVES & set(operations))
    }


def _place(buffer: PeakBuffer) -> tuple[str, str, str]:
    return buffer.array, buffer.source, buffer.group


def _total(buffers: list[PeakBuffer]) -> int:
    return sum(h.bytes for h in buffers)


def _places(buffers: list[PeakBuffer]) -> str:
    merged = merge_numbered(h.group for h in buffers)
    groups = dict.fromkeys(merged[h.group] for h in buffers)
    shown = ", ".join(list(groups)[:3])
    return shown + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")


def _line(what: str, remedy: str) -> Callable[[list[PeakBuffer]], str]:
    def line(buffers: list[PeakBuffer]) -> str:
        arrays = dict.fromkeys(h.array for h in buffers)
        shown = next(iter(arrays)) + (" ..." if len(arrays) > 1 else "")
        return (
            f"{format_bytes(_total(buffers))} {what} ({shown} in {_places(buffers)}): "
            f"jaxmem.substitute {remedy}"
        )

    return line


_LINES = {
    "attention": _line(
        "of attention scores, probabilities and masks",
        "recomputes them in the backward pass, block by block",
    ),
    "dropout": _line("of dropout masks", "keeps a PRNG key in their place"),
    "activation": _line(
        "of an activation function's inner values", "keeps only its input or its output"
    ),
    "weights": _line(
        "of weights cast to another type", "recomputes the casts in the backward pass"
    ),
}
