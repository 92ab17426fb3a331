"""Views: values seen through casts, transposes, reshapes and broadcasts.

Each dimension of a value carries a label: which index of the formula runs over it. A
value is known by its maker and its labels, and the operations that only move indices
disappear. Dimensions of size one carry no label.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from jaxmem.rewriting._flat_graph import FlatValue, Node
from jaxmem.rewriting._fold import folded

Labels = tuple[int | None, ...]


@dataclass
class Indices:
    """The labels of one attempt at a match, and the size each runs over."""

    sizes: dict[int | None, int] = field(default_factory=dict)
    splits: dict[tuple, Labels] = field(default_factory=dict)
    merges: dict[Labels, int] = field(default_factory=dict)

    def fresh(self, size: int) -> int:
        label = len(self.sizes)
        self.sizes[label] = size
        return label

    def root(self, shape: tuple[int, ...]) -> Labels:
        return tuple(self.fresh(n) for n in shape)

    def split(self, label: int | None, sizes: tuple[int, ...]) -> Labels:
        """Labels of the parts of an index that runs over several dimensions."""
        key = (label, len(sizes))
        if key not in self.splits:
            parts = tuple(map(self.fresh, sizes))
            self.splits[key] = parts
            if label is not None:
                self.merges[parts] = label
        for part, size in zip(self.splits[key], sizes, strict=True):
            self.sizes[part] = size
        return self.splits[key]

    def merge(self, labels: Labels, size: int) -> int:
        """The label of an index that runs over all of `labels`."""
        if labels not in self.merges:
            self.merges[labels] = self.fresh(size)
            self.splits[(self.merges[labels], len(labels))] = labels
        return self.merges[labels]


def without_units(labels: Labels, shape: tuple[int, ...]) -> Labels:
    return tuple(None if n == 1 else a for a, n in zip(labels, shape, strict=True))


def elementwise(operand: FlatValue, labels: Labels) -> Labels:
    """Labels of an operand of an elementwise operation whose output has `labels`."""
    return without_units(labels, operand.shape) if operand.shape else ()


def moved(node: Node, labels: Labels, indices: Indices) -> Labels:
    """Labels of the operand of what rearranges it to an output with `labels`."""
    shape = node.ins[0].shape
    if node.name == "transpose":
        inner: list[int | None] = [None] * len(shape)
        for out, i in enumerate(node.params["permutation"]):
            inner[i] = labels[out]
        return without_units(tuple(inner), shape)
    if node.name == "broadcast_in_dim":
        dims = node.params["broadcast_dimensions"]
        return without_units(tuple(labels[int(d)] for d in dims), shape)
    if node.name in ("reshape", "squeeze"):
        return _reshaped(shape, node.outs[0].shape, labels, indices)
    return without_units(labels, shape)


def _reshaped(shape, out_shape, labels: Labels, indices: Indices) -> Labels:
    # Dimensions are grouped so that the sizes of a group agree before and after.
    outs = [(a, n) for a, n in zip(labels, out_shape, strict=True) if n != 1]
    ins = [n for n in shape if n != 1]
    inner: list[int | None] = []
    while ins:
        inner += _group(ins, outs, indices)
    rest = iter(inner)
    return tuple(None if n == 1 else next(rest) for n in shape)


def _group(ins: list[int], outs: list, indices: Indices) -> Labels:
    """Takes one group off the front of `ins` and `outs`; labels of its inputs."""
    before, after = [ins.pop(0)], [outs.pop(0)]
    while math.prod(before) != math.prod(n for _, n in after):
        if math.prod(before) < math.prod(n for _, n in after):
            before.append(ins.pop(0))
        else:
            after.append(outs.pop(0))
    labels = tuple(a for a, _ in after)
    whole = labels[0] if len(after) == 1 else indices.merge(labels, math.prod(before))
    return (whole,) if len(before) == 1 else indices.split(whole, tuple(before))


@dataclass(frozen=True)
class View:
    """A value, its labels, and the nodes looked through on the way to it."""

    value: FlatValue
    labels: Labels
    through: tuple[Node, ...] = ()


def neutral(node: Node) -> int | None:
    """Which operand `node` returns unchanged, as x + 0, x - 0, max(x, -inf) do."""
    known = [folded(v) for v in node.ins]
    known = [None if k is None else k.value for k in known]
    if node.name == "select_n" and known[0] is not None:
        return 1 + int(known[0])
    nothing = {"add": 0, "sub": 0, "max": -np.inf, "min": np.inf, "and": 1, "or": 0}
    if node.name not in nothing or len(known) != 2:
        return None
    if node.name in ("and", "or") and node.outs[0].dtype != bool:
        return None
    if known[1] is not None and known[1] == nothing[node.name]:
        return 0
    if known[0] is not None and known[0] == nothing[node.name]:
        return 1 if node.name != "sub" else None
    return None


def below(value: FlatValue) -> FlatValue | None:
    """What a value is a cast, a view or a neutral sum of; None if it is none."""
    node = value.node
    if node is None or len(node.outs) != 1:
        return None
    which = 0 if node.record.rearranges else neutral(node)
    return None if which is None or folded(value) is not None else node.ins[which]


def bottom(value: FlatValue) -> FlatValue:
    """What a value is below all of its casts and views."""
    way = [value]
    while way[-1].bottom is None and (operand := below(way[-1])) is not None:
        way.append(operand)
    found = way[-1].bottom or way[-1]
    for one in way:  # so that whoever asks above need not go all the way again
        one.bottom = found
    return found


def look_through(
    value: FlatValue, labels: Labels, indices: Indices
) -> Iterator[tuple[FlatValue, Labels, Node | None]]:
    """A value, then what it is a view of: with labels, and the node looked through."""
    # `labels` are without those of dimensions of size one, as `elementwise` gives them
    yield value, labels, None
    while (operand := below(value)) is not None:
        node = value.node
        assert node is not None
        if node.name == "transpose" or operand.shape != value.shape:
            labels = moved(node, labels, indices)
        value = operand
        yield value, labels, node


def inserted(labels: Labels, axes: list[int], over: Labels) -> Labels:
    inner = list(labels)
    for axis, label in zip(axes, over, strict=True):
        inner.insert(axis, label)
    return tuple(inner)


def dot_operands(node: Node, labels: Labels, over: Labels) -> tuple[Labels, Labels]:
    """Labels of both operands of a `dot_general`; its output: batch, left, right."""
    contract, batch = node.params["dimension_numbers"]
    free = iter(labels[len(batch[0]) :])
    sides = []
    for operand, c, b in zip(node.ins, contract, batch, strict=True):
        side: list[int | None] = [None] * len(operand.shape)
        for i, dim in enumerate(b):
            side[dim] = labels[i]
        for i, dim in enumerate(c):
            side[dim] = over[i]
        for dim in range(len(side)):
            if dim not in (*b, *c):
                side[dim] = next(free)
        sides.append(elementwise(operand, tuple(side)))
    return sides[0], sides[1]
