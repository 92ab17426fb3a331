"""Which axes of an operation's operands and outputs are the same axis, as in einsum.

Every axis has a label. Axes that share one are cut together: a slice of the operands
gives the slice of the outputs. A label that no output has is reduced: the outputs of
the slices are combined. An axis without a label cannot be cut.

"Cut in n parts" is the view [before, n, rest] of an array in row-major order, so that
an axis that a reshape splits or merges can still be cut if both shapes have that view.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.ir import primitives
from jaxmem.ir.placements import REPLICATE, Partial, Placement, Placements, Shard, at
from jaxmem.ir.placements import label_products as products
from jaxmem.ir.placements import labels as rules
from jaxmem.ir.placements.labels import Labels, Rule
from jaxmem.ir.primitives import Kind
from jaxmem.ir.types import JaxprEqn

UNKNOWN = "it is not known to work part by part"
TWO = "two axes meet in it"
WHOLE = "it needs the whole axis"
MERGED = "the axis is split or merged"
SOME = "some of its operands are not cut"
DIVIDES = "does not divide its axis"


def labels(eqn: JaxprEqn, n: int) -> Labels | str:
    """Of an equation's axes, for `n` parts; a text says why there are none."""
    if _compat.has_side_effects(eqn):  # they would happen once for each part
        return "it has side effects"
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        return UNKNOWN
    if not primitives.is_constraint(eqn) and _sharding(eqn) is not None:
        return "it names a sharding"
    return rule(eqn, n)


def place(
    eqn: JaxprEqn,
    ins: Sequence[Placement],
    outs: Sequence[Placement],
    n: int,
    table: Labels | str | None = None,
    single: bool = False,
) -> Placements | str:
    """How an equation works on one of `n` parts, from what is known of its arrays.

    Args:
      eqn: an equation.
      ins: which operands are known to be cut; `REPLICATE` where that is open.
      outs: the same for the outputs.
      n: how many parts there are; an axis that it does not divide is not cut.
      table: what `labels(eqn, n)` gives, where it is known already.
      single: whether each part is one element of the axis (a layer, a word), so that
        no array has the axis merged with another.
    """
    table = labels(eqn, n) if table is None else table
    if isinstance(table, str):
        return table
    names = table.ins + table.outs
    known = zip(names, [*ins, *outs], strict=True)
    chosen = {of_axis[p.axis] for of_axis, p in known if isinstance(p, Shard)}
    if None in chosen:
        return WHOLE
    places: list[Placement] = []
    divided, merged = True, False
    for v, of_axis in zip([*eqn.invars, *eqn.outvars], names, strict=True):
        found = [d for d, label in enumerate(of_axis) if label in chosen]
        if len(found) > 1:
            return TWO
        places.append(at(found[0]) if found else REPLICATE)
        if found:
            size = v.aval.shape[found[0]]
            divided &= size % n == 0
            merged |= single and size not in (0, n)
    if not divided:
        return f"{n} {DIVIDES}"
    of_ins, of_outs = tuple(places[: len(table.ins)]), tuple(places[len(table.ins) :])
    if REPLICATE in of_outs:
        if any(p is not REPLICATE for p in of_outs):
            return SOME
        if not table.combine:
            return WHOLE
        of_outs = (Partial(table.combine),) * len(of_outs)
    return MERGED if merged else Placements(of_ins, of_outs)


def same_axis(
    eqn: JaxprEqn, k: int, axis: int, n: int
) -> tuple[int | None, ...] | None:
    """Which axis of each operand, and of each output behind them, is one and the same.

    Args:
      eqn: an equation.
      k: the number of one of these arrays.
      axis: one of its axes; None is returned where it cannot be cut.
      n: into how many parts.
    """
    table = labels(eqn, n)
    if isinstance(table, str):
        return None
    label = (table.ins + table.outs)[k][axis]
    return None if label is None else table.axes(label)


def _sharding(eqn: JaxprEqn) -> Any:
    """A sharding that an equation asks for; transposed casts name that of no mesh."""
    sharding = eqn.params.get("sharding", eqn.params.get("out_sharding"))
    # inside of `shard_map` some name its mesh, and no axis of it
    named = any(names is not None for names in getattr(sharding, "spec", (True,)))
    return sharding if named and sharding is not None else None


def _of(rule: Rule, has: Callable[[primitives.Record], bool]) -> dict[str, Rule]:
    return dict.fromkeys(primitives.names(has), rule)


RULES: dict[str, Rule] = {
    **_of(rules.elementwise, lambda p: p.elementwise or p.kind is Kind.SPECIAL),
    **_of(rules.reduction, lambda p: p.kind is Kind.REDUCTION and not p.by_body),
    **_of(rules.along("axis"), lambda p: p.kind is Kind.CUMULATIVE),
    **_of(rules.psum, lambda p: p.kind is Kind.PSUM),
    **_of(rules.random_keys, lambda p: p.kind is Kind.KEY),
    **_of(products.scatter, lambda p: p.kind is Kind.SCATTER),
    **_of(products.matrices, lambda p: p.kind is Kind.MATRIX),
    **_of(products.windows, lambda p: p.kind is Kind.WINDOW and not p.by_body),
    **dict.fromkeys(["split", "top_k"], rules.along("axis")),
    **dict.fromkeys(["sort", "concatenate"], rules.along("dimension")),
    **dict.fromkeys(["pvary", "pcast"], rules.each_alone),
    **dict.fromkeys(["optimization_barrier", "name"], rules.each_alone),
    **dict.fromkeys(["slice", "dynamic_slice"], rules.sliced),
    "sharding_constraint": rules.constraint,
    "bitcast_convert_type": rules.bitcast,
    "device_put": rules.device_put,
    "dynamic_update_slice": rules.updated,
    "approx_top_k": rules.along("reduction_dimension"),
    "rev": rules.along("dimensions"),
    "iota": rules.iota,
    "broadcast_in_dim": rules.broadcast,
    "reshape": rules.reshape,
    "stack": rules.stack,
    "tile": rules.tile,
    "unstack": rules.unstack,
    "squeeze": rules.squeeze,
    "transpose": rules.transpose,
    "pad": rules.pad,
    "scan": rules.loop,
    "threefry2x32": rules.elementwise,
    "random_bits": rules.random_bits,
    "dot_general": products.dot_general,
    "conv_general_dilated": products.convolution,
    "gather": products.gather,
    "fft": products.fourier,
}

# What does more than compute: done for each part, it gives the same values, but sends
# more messages or transfers, which all devices must agree upon.
_PSUMS = primitives.names(lambda p: p.kind is Kind.PSUM)
BEYOND = {
    **dict.fromkeys(_PSUMS, "it sums over devices"),
    "device_put": "it sends arrays to another memory",
}


_SIZES = {
    "broadcast_in_dim": "shape",
    "iota": "shape",
    "reshape": "new_sizes",
    "slice": "limit_indices",
    "dynamic_slice": "slice_sizes",
}


def resized(
    eqn: JaxprEqn, placed: Placements, new: Callable[[int], int]
) -> dict[str, Any]:
    """The parameters of an equation for a part of its arrays.

    An `iota` that is cut along the axis that it counts begins at 0 in every part.

    Args:
      eqn: an equation with `labels`.
      placed: which of its arrays are cut.
      new: of the length of an axis that is cut, the length of its part.
    """
    params, name = dict(eqn.params), eqn.primitive.name
    ins, outs = placed.in_axes, placed.out_axes
    if "sharding" in params and name != "sharding_constraint":
        params["sharding"] = None  # that of no mesh, and of the whole array's rank
    at = lambda sizes, axis: (*sizes[:axis], new(sizes[axis]), *sizes[axis + 1 :])
    key, axis = _SIZES.get(name), outs[0] if outs else None
    if key and axis is not None:
        params[key] = at(params[key], axis)
    if name == "gather" and ins[0] is not None and params["slice_sizes"][ins[0]] > 1:
        # of a batch axis of the table one element is read at a time
        params["slice_sizes"] = at(params["slice_sizes"], ins[0])
    if name == "scan" and any(a is not None for a in (*ins, *outs)):
        params["length"] = new(params["length"])
    if name == "random_bits" and axis is not None and ins[0] is None:
        behind = axis - eqn.invars[0].aval.ndim
        params["shape"] = at(params["shape"], behind)
    if name == "conv_general_dilated" and axis is not None:
        params |= _fewer_groups(eqn, axis, new)
    return params


def _fewer_groups(
    eqn: JaxprEqn, axis: int, new: Callable[[int], int]
) -> dict[str, int]:
    """The groups of a convolution's part, where its features are cut."""
    if axis != eqn.params["dimension_numbers"].out_spec[1]:
        return {}
    size = eqn.outvars[0].aval.shape[axis]
    counts = {key: eqn.params[key] for key in products.GROUPS}
    return {k: c * new(size) // size for k, c in counts.items() if c > 1}
