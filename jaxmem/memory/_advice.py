"""What to do about the largest buffers, where that is simple to tell and true."""

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable

from jaxmem.memory._bytes import format_bytes
from jaxmem.memory._holder import Holder
from jaxmem.memory._module_path import merge_numbered

_LEAST = 0.01
CURVES = frozenset("tanh erf erfc logistic erf_inv".split())


def advise(
    at_peak: Iterable[Holder], curved: Collection[tuple[str, str]] = ()
) -> tuple[str, ...]:
    """One line for each cause that `jaxmem.substitute` removes, largest first.

    `curved` are the lines and modules that compute a tanh, an erf or the like.
    """
    at_peak = tuple(at_peak)
    least = _LEAST * sum(h.bytes for h in at_peak)
    arguments = {h.shape for h in at_peak if h.kind == "argument"}
    weights = arguments | {shape[1:] for shape in arguments}
    found: dict[str, list[Holder]] = defaultdict(list)
    curves = _curve_places(at_peak, curved)
    scores = {h.shape for h in at_peak if _is_exp_of_square(h)}
    for h in at_peak:
        plain = h.kind == "temp" and h.shape and "jaxmem." not in h.module_path
        if plain and (cause := _cause(h, weights, curves, scores)):
            found[cause].append(h)
    lines = sorted(found.items(), key=lambda item: -_total(item[1]))
    return tuple(_LINES[c](hs) for c, hs in lines if _total(hs) >= least)


def _cause(holder: Holder, weights: set, curves: set, scores: set) -> str:
    operation = holder.operation.rsplit("/", 1)[-1]
    named = f"{holder.module_path} {holder.function} {holder.operation}".lower()
    told = "attention" in named or "attn" in named or "softmax" in named
    if _is_square(holder) and (told or holder.shape in scores):
        return "attention"
    if holder.dtype == "bool" and operation == "lt" and "bernoulli" in holder.operation:
        return "dropout"
    if _place(holder) in curves:
        return "activation"
    if operation == "convert_element_type" and holder.shape in weights:
        return "weights"
    return ""


def _is_exp_of_square(holder: Holder) -> bool:
    return _is_square(holder) and holder.operation.rsplit("/", 1)[-1] == "exp"


def _is_square(holder: Holder) -> bool:
    """[..., heads, S, S]: a stack of weights has fewer dimensions."""
    shape = holder.shape
    return len(shape) >= 4 and shape[-1] == shape[-2] >= 64


def _curve_places(at_peak: Iterable[Holder], curved: Collection) -> set:
    """Places that keep several buffers of one type round a tanh, erf or the like."""
    places = defaultdict(list)
    for h in at_peak:
        if h.kind == "temp" and h.source and "dot_general" not in h.operation:
            places[_place(h)].append(h.operation.rsplit("/", 1)[-1])
    return {
        place
        for place, operations in places.items()
        if len(operations) > 1 and (place[1:] in curved or CURVES & set(operations))
    }


def _place(holder: Holder) -> tuple[str, str, str]:
    return holder.array, holder.source, holder.group


def _total(holders: list[Holder]) -> int:
    return sum(h.bytes for h in holders)


def _places(holders: list[Holder]) -> str:
    merged = merge_numbered(h.group for h in holders)
    groups = dict.fromkeys(merged[h.group] for h in holders)
    shown = ", ".join(list(groups)[:3])
    return shown + (f" and {len(groups) - 3} more" if len(groups) > 3 else "")


def _line(what: str, remedy: str) -> Callable[[list[Holder]], str]:
    def line(holders: list[Holder]) -> str:
        arrays = dict.fromkeys(h.array for h in holders)
        shown = next(iter(arrays)) + (" ..." if len(arrays) > 1 else "")
        return (
            f"{format_bytes(_total(holders))} {what} ({shown} in {_places(holders)}): "
            f"jaxmem.substitute {remedy}"
        )

    return line


_LINES = {
    "attention": _line(
        "of attention scores, probabilities and masks",
        "makes them again in the backward pass, block by block",
    ),
    "dropout": _line("of dropout masks", "keeps a key in their place"),
    "activation": _line(
        "of an activation function's inner values", "keeps its input or output alone"
    ),
    "weights": _line(
        "of weights cast to another type", "casts them again in the backward pass"
    ),
}
