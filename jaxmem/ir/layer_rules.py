"""One rule an operation: what it does to the axis along which a scan stacks."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from jaxmem.ir.primitives import ELEMENTWISE, VARYING
from jaxmem.ir.scans import split

Axis = int | None  # None: not along the layers, the whole array is used


class Batched(NamedTuple):
    """The operation can be done a layer at a time, on operands cut along `ins`."""

    ins: tuple[Axis, ...]
    outs: tuple[int, ...]


class Reduced(NamedTuple):
    """The operation combines the layers by `combine`, a binary operation of `lax`."""

    ins: tuple[Axis, ...]
    combine: str


Treatment = Batched | Reduced | str  # a text says why it is neither
Rule = Callable[[Any, Sequence[Axis]], Treatment]


def _one_axis(axes: Sequence[Axis]) -> int | None:
    found = {a for a in axes if a is not None}
    return found.pop() if len(found) == 1 else None


_TWO = "its operands have the layers along different axes"


def _elementwise(eqn, axes: Sequence[Axis]) -> Treatment:
    axis = _one_axis(axes)
    if axis is None:
        return _TWO
    ins = operands_along(eqn, axis)
    # an operand of size one along the layers is broadcast over them
    if any(a is not None and b is None for a, b in zip(axes, ins, strict=True)):
        return "it repeats a single layer"
    return Batched(ins, (axis,) * len(eqn.outvars))


def operands_along(eqn, axis: int) -> tuple[Axis, ...]:
    """The axis, or None for a scalar and for one layer that meets all of them."""
    size = eqn.outvars[0].aval.shape[axis]
    shapes = (v.aval.shape for v in eqn.invars)
    return tuple(axis if s and s[axis] == size else None for s in shapes)


def is_plain_bitcast(eqn) -> bool:
    """Whether an operation reads the bits of each element as another type."""
    return (
        eqn.primitive.name == "bitcast_convert_type"
        and eqn.invars[0].aval.shape == eqn.outvars[0].aval.shape
    )


def _bitcast(eqn, axes: Sequence[Axis]) -> Treatment:
    same = is_plain_bitcast(eqn)
    return _elementwise(eqn, axes) if same else "it changes the number of axes"


def _each_alone(eqn, axes: Sequence[Axis]) -> Treatment:
    """Operand i gives output i: a sum over devices, a barrier."""
    if any(a is None for a in axes):
        return "some of its operands do not run along the layers"
    return Batched(tuple(axes), tuple(a for a in axes if a is not None))


def is_to_memory(eqn) -> bool:
    """Whether it sends arrays to another memory of their device, and nothing else."""
    places = eqn.params.get("devices", ())
    sends = eqn.primitive.name == "device_put"
    return sends and all(isinstance(place, jax.memory.Space) for place in places)


def _device_put(eqn, axes: Sequence[Axis]) -> Treatment:
    return _each_alone(eqn, axes) if is_to_memory(eqn) else "it names a sharding"


CONSTRAINT = "sharding_constraint"


def _constraint(eqn, axes: Sequence[Axis]) -> Treatment:
    axis = _one_axis(axes)
    if axis is None or not leaves_whole(eqn, axis):
        return "it spreads the layers over devices"
    return Batched((axis,), (axis,))


def leaves_whole(eqn, axis: int) -> bool:
    """Whether a constraint holds for a slice along an axis as it is."""
    spec = getattr(eqn.params["sharding"], "spec", None)
    free = eqn.params["layout"] is None and axis not in eqn.params["unconstrained_dims"]
    return spec is not None and free and (axis >= len(spec) or spec[axis] is None)


def _psum(eqn, axes: Sequence[Axis]) -> Treatment:
    named = all(isinstance(a, str) for a in eqn.params["axes"])
    if not named or eqn.params.get("axis_index_groups") is not None:
        return "it sums over more than named axes of the mesh"
    return _each_alone(eqn, axes)


_COMBINE = {
    "reduce_sum": "add",
    "reduce_max": "max",
    "reduce_min": "min",
    "reduce_prod": "mul",
    "reduce_and": "bitwise_and",
    "reduce_or": "bitwise_or",
    "reduce_xor": "bitwise_xor",
}


def _reduce(eqn, axes: Sequence[Axis]) -> Treatment:
    (axis,), over = axes, eqn.params["axes"]
    if axis is None or axis in over:
        combine = _COMBINE.get(eqn.primitive.name)
        return Reduced((axis,), combine) if combine else "it is over the layers"
    return Batched((axis,), (axis - sum(d < axis for d in over),))


def _keeps(parameter: str) -> Rule:
    """Operations along the axes that `parameter` names; all others are batch axes."""

    def rule(eqn, axes: Sequence[Axis]) -> Treatment:
        over = eqn.params[parameter]
        over = (over,) if isinstance(over, int) else over
        # along any other axis a slice gives a slice of the result
        along = _one_axis(axes) in over
        return "it is along the layers" if along else _elementwise(eqn, axes)

    return rule


def _broadcast(eqn, axes: Sequence[Axis]) -> Treatment:
    if axes[0] is None or len(axes) > 1:
        return "its shape is not static"
    out = eqn.params["broadcast_dimensions"][axes[0]]
    if eqn.params["shape"][out] != eqn.invars[0].aval.shape[axes[0]]:
        return "it repeats a single layer"
    return Batched((axes[0],), (out,))


def broadcast_operand(eqn, out_axis: int) -> tuple[Axis, ...] | None:
    if len(eqn.invars) != 1:
        return None
    dims, operand = eqn.params["broadcast_dimensions"], eqn.invars[0].aval
    if out_axis not in dims or operand.shape[dims.index(out_axis)] == 1:
        return (None,)
    return (dims.index(out_axis),)


def kept_axis(shape, new: Sequence[int], axis: int) -> int | None:
    """Where a reshape puts an axis that it neither splits nor merges."""
    before = math.prod(shape[:axis])
    for i, size in enumerate(new):
        # in row-major order an axis stays whole if as many elements stand before it
        if math.prod(new[:i]) == before and size == shape[axis]:
            return i
    return None


def _reshape(eqn, axes: Sequence[Axis]) -> Treatment:
    if len(axes) > 1 or axes[0] is None or eqn.params["dimensions"] is not None:
        return "its shape is not static"
    shape, new = eqn.invars[0].aval.shape, eqn.params["new_sizes"]
    out = kept_axis(shape, new, axes[0])
    return "it merges the layers" if out is None else Batched((axes[0],), (out,))


def _squeeze(eqn, axes: Sequence[Axis]) -> Treatment:
    (axis,), over = axes, eqn.params["dimensions"]
    if axis is None or axis in over:
        return "it removes the axis of the layers"
    return Batched((axis,), (axis - sum(d < axis for d in over),))


def _transpose(eqn, axes: Sequence[Axis]) -> Treatment:
    out = tuple(eqn.params["permutation"]).index(axes[0])
    return Batched((axes[0],), (out,))


def _slice(eqn, axes: Sequence[Axis]) -> Treatment:
    axis, p = axes[0], eqn.params
    assert axis is not None
    size = eqn.invars[0].aval.shape[axis]
    whole = p["start_indices"][axis] == 0 and p["limit_indices"][axis] == size
    if not whole or (p["strides"] and p["strides"][axis] != 1):
        return "it takes some of the layers"
    return Batched((axis,), (axis,))


def _pad(eqn, axes: Sequence[Axis]) -> Treatment:
    axis = axes[0]
    if axis is None or any(eqn.params["padding_config"][axis]):
        return "it pads the layers"
    return Batched((axis, None), (axis,))


def _concatenate(eqn, axes: Sequence[Axis]) -> Treatment:
    axis = _one_axis(axes)
    if axis is None:
        return _TWO
    if axis == eqn.params["dimension"]:
        return "it joins arrays along the layers"
    return Batched((axis,) * len(axes), (axis,))


def _dot_general(eqn, axes: Sequence[Axis]) -> Treatment:
    contracted, batch = eqn.params["dimension_numbers"]
    for side in (0, 1):
        axis = axes[side]
        if axis is None:
            continue
        if axis in contracted[side]:
            return "it sums over the layers"
        if axis not in batch[side]:
            return _dot_free(eqn, axes, side, axis)
        i = batch[side].index(axis)
        ins = (batch[0][i], batch[1][i])
        if any(a not in (None, b) for a, b in zip(axes, ins, strict=True)):
            return _TWO
        # batch axes come first in the output
        return Batched(ins, (i,))
    return _TWO


def _dot_free(eqn, axes: Sequence[Axis], side: int, axis: int) -> Treatment:
    """The layers are rows (or columns) of a matrix that meets one other matrix."""
    if axes[1 - side] is not None:
        return "it multiplies each layer by every other"
    contracted, batch = eqn.params["dimension_numbers"]

    def free(s: int) -> list[int]:
        taken = {*contracted[s], *batch[s]}
        return [d for d in range(eqn.invars[s].aval.ndim) if d not in taken]

    # the output has the batch, then the left operand's free axes, then the right's
    out = len(batch[0]) + free(side).index(axis)
    return Batched(tuple(axes), (out + (len(free(0)) if side else 0),))


_VECTORS = {("householder_product", 1): 1}  # operands with one axis a layer, not two


def _batch_of_matrices(eqn, axes: Sequence[Axis]) -> Treatment:
    axis = _one_axis(axes)
    if axis is None:
        return _TWO
    matrices = [
        v.aval.ndim - (_VECTORS.get((eqn.primitive.name, i), 2))
        for i, v in enumerate(eqn.invars)
    ]
    # the last axes are those of the matrices
    if any(axis >= batch for batch in matrices):
        return "it decomposes the layers themselves"
    return Batched((axis,) * len(axes), (axis,) * len(eqn.outvars))


def _loop(eqn, axes: Sequence[Axis]) -> Treatment:
    """A scan over the layers, each of which it does alone: `lax.map`."""
    constants, carried, xs = split(eqn, list(axes))
    if carried or any(a is not None for a in constants):
        return "it carries something from one layer to the next"
    if any(a not in (None, 0) for a in xs):
        return "it loops over another axis"
    ins = (*[None] * len(constants), *[0] * len(xs))
    return Batched(ins, (0,) * len(eqn.outvars))


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, _elementwise),
    **dict.fromkeys([*_COMBINE, "argmax", "argmin"], _reduce),
    **dict.fromkeys(["cumsum", "cumprod", "cummax", "cummin"], _keeps("axis")),
    "cumlogsumexp": _keeps("axis"),
    "rev": _keeps("dimensions"),
    "sort": _keeps("dimension"),
    "split": _keeps("axis"),
    **dict.fromkeys(["psum", "psum2", "psum_invariant"], _psum),
    **dict.fromkeys([*VARYING, "optimization_barrier"], _each_alone),
    "bitcast_convert_type": _bitcast,
    "device_put": _device_put,
    CONSTRAINT: _constraint,
    "broadcast_in_dim": _broadcast,
    "reshape": _reshape,
    "squeeze": _squeeze,
    "transpose": _transpose,
    "slice": _slice,
    "pad": _pad,
    "concatenate": _concatenate,
    "dot_general": _dot_general,
    "scan": _loop,
    **dict.fromkeys(
        "cholesky eigh geqrf householder_product lu qr svd triangular_solve".split(),
        _batch_of_matrices,
    ),
}
