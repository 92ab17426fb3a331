"""Which axes of an operation's operands and outputs are the same axis, as in einsum.

Every axis has a label. Axes that share one are cut together: a slice of the operands
gives the slice of the outputs. A label that no output has is reduced: the outputs of
the slices are combined. An axis without a label cannot be cut.

"Cut in n parts" is the view [before, n, rest] of an array in row-major order, so that
an axis that a reshape splits or merges can still be cut if both shapes have that view.
"""

import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

from jaxmem import _compat
from jaxmem.ir.primitives import ELEMENTWISE, VARYING

Label = Hashable  # None: the axis cannot be cut


class Labels(NamedTuple):
    """The labels of every axis of every operand and of every output.

    Attributes:
      ins: one tuple an operand, with a label an axis.
      outs: the same for the outputs.
      combine: the binary operation of `lax` that combines the outputs of the parts
        where the label is in no output; empty where they cannot be combined.
    """

    ins: tuple[tuple[Label, ...], ...]
    outs: tuple[tuple[Label, ...], ...]
    combine: str = ""


Rule = Callable[[Any, int], Labels | str]


def labels(eqn, n: int) -> Labels | str:
    """Of an equation's axes, for `n` parts; a text says why there are none."""
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        return "it is not known to work part by part"
    if _compat.has_side_effects(eqn):  # they would happen once for each part
        return "it has side effects"
    return rule(eqn, n)


def _axes(atom) -> tuple[int, ...]:
    return tuple(range(atom.aval.ndim))


def _none(atom) -> tuple[Label, ...]:
    return (None,) * atom.aval.ndim


def _elementwise(eqn, n: int) -> Labels:
    del n
    out = eqn.outvars[0].aval.shape

    def operand(atom) -> tuple[Label, ...]:
        shape = atom.aval.shape  # an axis of size one meets every part
        return tuple(None if s == 1 < out[d] else d for d, s in enumerate(shape))

    ins = tuple(map(operand, eqn.invars))
    return Labels(ins, tuple(map(_axes, eqn.outvars)))


def _each_alone(eqn, n: int) -> Labels:
    """Operand i gives output i; all are cut along the same axis, or not at all."""
    del n
    return Labels(tuple(map(_axes, eqn.invars)), tuple(map(_axes, eqn.outvars)))


def _iota(eqn, n: int) -> Labels:
    del n
    return Labels((), (_axes(eqn.outvars[0]),))


def _broadcast(eqn, n: int) -> Labels | str:
    del n
    if len(eqn.invars) > 1:
        return "its shape is not static"
    (operand,), out = eqn.invars, eqn.outvars[0].aval.shape
    places = zip(eqn.params["broadcast_dimensions"], operand.aval.shape, strict=True)
    ins = tuple(int(d) if out[d] == size else None for d, size in places)
    return Labels((ins,), (_axes(eqn.outvars[0]),))


def _reshape(eqn, n: int) -> Labels | str:
    if len(eqn.invars) > 1 or eqn.params["dimensions"] is not None:
        return "its shape is not static"
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    ins: list[Label] = [None] * len(old)
    outs: list[Label] = [None] * len(new)
    for i, size in enumerate(old):
        for j, other in enumerate(new):
            same = math.prod(old[:i]) == math.prod(new[:j])  # of the same view
            if same and size % n == 0 and other % n == 0:
                ins[i] = outs[j] = i
    return Labels((tuple(ins),), (tuple(outs),))


def _squeeze(eqn, n: int) -> Labels:
    del n
    every, gone = _axes(eqn.invars[0]), eqn.params["dimensions"]
    return Labels((every,), (tuple(d for d in every if d not in gone),))


def _expand(eqn, n: int) -> Labels:
    del n
    new = eqn.params["dimensions"]
    old = iter(_axes(eqn.invars[0]))
    outs = tuple(None if d in new else next(old) for d in _axes(eqn.outvars[0]))
    return Labels((_axes(eqn.invars[0]),), (outs,))


def _transpose(eqn, n: int) -> Labels:
    del n
    outs = tuple(int(d) for d in eqn.params["permutation"])
    return Labels((_axes(eqn.invars[0]),), (outs,))


_COMBINE = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "bitwise_and",
    "reduce_or": "bitwise_or",
    "reduce_xor": "bitwise_xor",
}


def _reduce(eqn, n: int) -> Labels:
    del n
    combine, over = _COMBINE.get(eqn.primitive.name, ""), eqn.params["axes"]
    every = _axes(eqn.invars[0])
    ins = tuple(d if combine or d not in over else None for d in every)
    return Labels((ins,), (tuple(d for d in every if d not in over),), combine)


def _along(parameter: str) -> Rule:
    """Operations along the axes that a parameter names; all others are batch axes."""

    def rule(eqn, n: int) -> Labels:
        del n
        over = eqn.params[parameter]
        over = (over,) if isinstance(over, int) else over
        free = lambda v: tuple(None if d in over else d for d in _axes(v))
        return Labels(tuple(map(free, eqn.invars)), tuple(map(free, eqn.outvars)))

    return rule


def _sliced(eqn, n: int) -> Labels:
    """Slices of which some axes are taken whole."""
    del n
    pairs = zip(eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape, strict=True)
    free = tuple(d if old == new else None for d, (old, new) in enumerate(pairs))
    # A step of -1 gives as many elements, in another order; `lax.slice` has none such.
    return Labels((free, *map(_none, eqn.invars[1:])), (free,))


def _updated(eqn, n: int) -> Labels:
    """An array with a slice written into it; where the slice has the whole axis."""
    del n
    array, new, *starts = eqn.invars
    pairs = zip(array.aval.shape, new.aval.shape, strict=True)
    free = tuple(d if old == size else None for d, (old, size) in enumerate(pairs))
    return Labels((free, free, *map(_none, starts)), (free,))


def _pad(eqn, n: int) -> Labels:
    del n
    padded = eqn.params["padding_config"]
    free = tuple(None if any(p) else d for d, p in enumerate(padded))
    return Labels((free, ()), (free,))


def _dot_general(eqn, n: int) -> Labels:
    del n
    (contracted, batch) = eqn.params["dimension_numbers"]
    sides = [[(side, d) for d in _axes(v)] for side, v in enumerate(eqn.invars)]
    shared = zip((*contracted[0], *batch[0]), (*contracted[1], *batch[1]), strict=True)
    for k, (left, right) in enumerate(shared):
        sides[0][left] = sides[1][right] = (2, k)

    def free(side: int) -> list[Label]:
        taken = {*contracted[side], *batch[side]}
        return [name for d, name in enumerate(sides[side]) if d not in taken]

    outs = [*(sides[0][d] for d in batch[0]), *free(0), *free(1)]
    return Labels((tuple(sides[0]), tuple(sides[1])), (tuple(outs),), "add")


def _convolution(eqn, n: int) -> Labels | str:
    """Images and features are cut; places of an image overlap and are not."""
    del n
    p = eqn.params
    if p["feature_group_count"] != 1 or p["batch_group_count"] != 1:
        return "it has groups of features"
    spec = p["dimension_numbers"]
    sides = [list(_none(v)) for v in (*eqn.invars, *eqn.outvars)]
    pairs = {  # (batch, in features), (out features, in features), (batch, features)
        "batch": ((0, spec.lhs_spec[0]), (2, spec.out_spec[0])),
        "contracted": ((0, spec.lhs_spec[1]), (1, spec.rhs_spec[1])),
        "features": ((1, spec.rhs_spec[0]), (2, spec.out_spec[1])),
    }
    for name, places in pairs.items():
        for side, d in places:
            sides[side][d] = name
    left, right, out = map(tuple, sides)
    return Labels((left, right), (out,), "add")


def _gather(eqn, n: int) -> Labels:
    del n
    d = eqn.params["dimension_numbers"]
    batching = d.operand_batching_dims, d.start_indices_batching_dims
    table, index, rows = _windows(
        eqn.invars[0].aval.shape,
        eqn.invars[1].aval.shape,
        eqn.outvars[0].aval.shape,
        (d.offset_dims, d.collapsed_slice_dims, d.start_index_map, *batching),
    )
    return Labels((table, index), (rows,))


def _scatter_add(eqn, n: int) -> Labels:
    del n
    d = eqn.params["dimension_numbers"]
    batching = d.operand_batching_dims, d.scatter_indices_batching_dims
    named = d.update_window_dims, d.inserted_window_dims
    table, index, rows = _windows(
        *(v.aval.shape for v in eqn.invars),
        (*named, d.scatter_dims_to_operand_dims, *batching),
    )
    return Labels((table, index, rows), (table,), "add")


def _windows(table: Sequence[int], index: Sequence[int], rows: Sequence[int], names):
    """Labels of a table, of indices, and of the rows that are read or written there."""
    inside, gone, start, batching, shared = names
    of_index: list[Label] = [*(("index", k) for k in range(len(index) - 1)), None]
    of_table: list[Label] = [None] * len(table)
    of_rows: list[Label] = [None] * len(rows)
    outside = (k for k in range(len(rows)) if k not in inside)
    for k, place in enumerate(outside):
        of_rows[place] = of_index[k]
    for a, b in zip(batching, shared, strict=True):
        of_table[a] = of_index[b]
    kept = (k for k in range(len(table)) if k not in (*gone, *batching))
    for k, place in zip(kept, inside, strict=True):
        if rows[place] == table[k] and k not in start:
            of_table[k] = of_rows[place] = ("window", k)
    return tuple(of_table), tuple(of_index), tuple(of_rows)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE | {"clamp", "select_n"}, _elementwise),
    **dict.fromkeys([*_COMBINE, "argmax", "argmin"], _reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin"], _along("axis")),
    **dict.fromkeys(["cumlogsumexp", "split"], _along("axis")),
    **dict.fromkeys(["sort", "concatenate"], _along("dimension")),
    **dict.fromkeys([*VARYING, "optimization_barrier", "name"], _each_alone),
    **dict.fromkeys(["slice", "dynamic_slice"], _sliced),
    "dynamic_update_slice": _updated,
    "rev": _along("dimensions"),
    "iota": _iota,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "expand_dims": _expand,
    "transpose": _transpose,
    "pad": _pad,
    "dot_general": _dot_general,
    "conv_general_dilated": _convolution,
    "gather": _gather,
    "scatter-add": _scatter_add,
}


_SIZES = {
    "broadcast_in_dim": "shape",
    "iota": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}


def narrowed(eqn, ins: Sequence[int | None], outs: Sequence[int | None], n: int):
    """The parameters of an equation for one of `n` parts.

    Args:
      eqn: an equation with `labels`.
      ins: along which axis each operand is cut; None for one that is whole.
      outs: the same for the outputs.
      n: how many parts there are.
    """
    return resized(eqn, ins, outs, lambda size: size // n)


def resized(
    eqn,
    ins: Sequence[int | None],
    outs: Sequence[int | None],
    new: Callable[[int], int],
):
    """The same, for a part whose length `new` gives of that of the whole."""
    params, name = dict(eqn.params), eqn.primitive.name
    if "sharding" in params:  # that of no mesh, and of the whole array's rank
        params["sharding"] = None
    key, axis = _SIZES.get(name), outs[0] if outs else None
    if key and axis is not None:
        sizes = list(params[key])
        sizes[axis] = new(sizes[axis])
        params[key] = tuple(sizes)
    if name == "gather" and ins[0] is not None:
        sizes = list(params["slice_sizes"])
        # A batch axis of the table is read one element at a time.
        sizes[ins[0]] = max(1, new(sizes[ins[0]])) if sizes[ins[0]] > 1 else 1
        params["slice_sizes"] = tuple(sizes)
    return params
