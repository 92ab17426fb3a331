"""Along which axes devices hold different parts, after an operation of each device.

An axis of a result is placed as those of the operands that it comes from. Where an
operation is not listed here, no axis of its result is said to be.
"""

import re
from collections.abc import Sequence
from typing import Any

from jaxmem.memory.buffers import Instruction
from jaxmem.memory.buffers.device_groups import Labels, labels_of
from jaxmem.memory.buffers.shapes import arrays_of

Where = tuple[Labels | None, ...]

_LAYOUT = re.compile(r"\]\{([\d,]*)")
_NOT_BY_ELEMENT = frozenset(
    "concatenate pad gather scatter sort reduce-window select-and-scatter iota "
    "constant convolution custom-call rng-bit-generator reverse fft cholesky "
    "triangular-solve map topk".split()
)


def where(made: Instruction, shapes: Sequence[str], operands: Sequence[Any]) -> Where:
    """The placed axes of a result, from the shapes and shardings of its operands."""
    sizes = _sizes(made.shape)
    nowhere: Where = (None,) * len(sizes)
    pairs = list(zip(shapes, operands, strict=True))
    if not pairs or made.opcode in _NOT_BY_ELEMENT:
        return nowhere
    inputs = [_padded(one.where, len(_sizes(shape))) for shape, one in pairs]
    rule = _RULES.get(made.opcode)
    if rule is not None:
        return rule(made, shapes, operands, inputs)
    return _by_element(sizes, shapes, inputs)


def merged(a: Any, b: Any) -> Where:
    """The axes that two values of one shape have in common."""
    if len(a.where) != len(b.where):
        return ()
    pairs = zip(a.where, b.where, strict=True)
    return tuple(refined(x, y) for x, y in pairs)


def refined(a: Labels | None, b: Labels | None) -> Labels | None:
    """An axis that is placed as one of two, or as both."""
    if a is None or b is None or a == b:
        return a if b is None else b
    return labels_of(list(zip(a, b, strict=True)))


def limits(made: Instruction) -> list[tuple[int, ...]]:
    """(start, stop[, step]) of a slice, along each axis."""
    found = re.search(r"slice=\{([^}]*)\}", made.attributes)
    cuts = re.findall(r"\[([\d:]+)\]", found[1]) if found else ()
    return [tuple(map(int, cut.split(":"))) for cut in cuts]


def _by_element(sizes, shapes: Sequence[str], inputs: Sequence[Where]) -> Where:
    found: Where = (None,) * len(sizes)
    for shape, axes in zip(shapes, inputs, strict=True):
        if _sizes(shape) == sizes:
            found = tuple(map(refined, found, axes))
    return found


def _broadcast(made, shapes, operands, inputs) -> Where:
    found: list[Labels | None] = [None] * len(_sizes(made.shape))
    for axis, target in enumerate(made.listed("dimensions")):
        found[target] = inputs[0][axis]
    return tuple(found)


def _transpose(made, shapes, operands, inputs) -> Where:
    return tuple(inputs[0][axis] for axis in made.listed("dimensions"))


def _reduce(made, shapes, operands, inputs) -> Where:
    gone = made.listed("dimensions")
    return tuple(axis for i, axis in enumerate(inputs[0]) if i not in gone)


def _dot(made, shapes, operands, inputs) -> Where:
    lhs, rhs = inputs[:2]
    batch = [made.listed(f"{side}_batch_dims") for side in ("lhs", "rhs")]
    summed = [made.listed(f"{side}_contracting_dims") for side in ("lhs", "rhs")]
    both = [refined(lhs[a], rhs[b]) for a, b in zip(*batch, strict=True)]
    free = [
        axis
        for side, used, gone in zip((lhs, rhs), batch, summed, strict=True)
        for i, axis in enumerate(side)
        if i not in used and i not in gone
    ]
    return (*both, *free)


def _reshape(made, shapes, operands, inputs) -> Where:
    """Where nothing but axes of size 1 comes or goes, as they lie in memory."""
    before, after = _order(made, shapes[0]), _order(made, made.shape)
    sizes, new = _sizes(shapes[0]), _sizes(made.shape)
    old = [axis for axis in before if sizes[axis] != 1]
    kept = [axis for axis in after if new[axis] != 1]
    found: list[Labels | None] = [None] * len(new)
    if [sizes[axis] for axis in old] == [new[axis] for axis in kept]:
        for a, b in zip(old, kept, strict=True):
            found[b] = inputs[0][a]
    return tuple(found)


def _order(made: Instruction, shape: str) -> list[int]:
    """The axes from the outermost; of a bitcast as they lie in memory."""
    layout = _LAYOUT.search(shape)
    if made.opcode == "bitcast" and layout and layout[1]:
        return [int(axis) for axis in reversed(layout[1].split(","))]
    return list(range(len(_sizes(shape))))


def _slice(made, shapes, operands, inputs) -> Where:
    """A part that the device's number chooses is placed by it."""
    before, after = _sizes(shapes[0]), _sizes(made.shape)
    found = list(inputs[0])
    for axis, (old, new) in enumerate(zip(before, after, strict=True)):
        if old != new and made.opcode == "dynamic-slice":
            start = operands[1 + axis].who
            if len(set(start)) > 1:
                found[axis] = refined(found[axis], start)
    return tuple(found)


def _select(made, shapes, operands, inputs) -> Where:
    """What devices keep by choices of their own, a sum may bring together unharmed."""
    if len(set(operands[0].who)) > 1:
        return (None,) * len(_sizes(made.shape))
    return _by_element(_sizes(made.shape), shapes, inputs)


def _multiply(made, shapes, operands, inputs) -> Where:
    """The same by a product with zero or one."""
    for one in operands:
        if one.exact is not None and len(set(one.who)) > 1:
            return (None,) * len(_sizes(made.shape))
    return _by_element(_sizes(made.shape), shapes, inputs)


def _update(made, shapes, operands, inputs) -> Where:
    """A part that is put into the whole is at its place."""
    whole, part = _sizes(shapes[0]), _sizes(shapes[1])
    return tuple(
        refined(a, b) if old == new else a
        for a, b, old, new in zip(*inputs[:2], whole, part, strict=True)
    )


_RULES = {
    "broadcast": _broadcast,
    "transpose": _transpose,
    "reduce": _reduce,
    "dot": _dot,
    "reshape": _reshape,
    "bitcast": _reshape,
    "slice": _slice,
    "dynamic-slice": _slice,
    "dynamic-update-slice": _update,
    "select": _select,
    "multiply": _multiply,
}


def _sizes(shape: str) -> tuple[int, ...]:
    arrays = arrays_of(shape)
    return arrays[0].sizes if arrays else ()


def _padded(axes: Where, rank: int) -> Where:
    """The axes of a value of which none may have been said."""
    return axes if len(axes) == rank else (None,) * rank
