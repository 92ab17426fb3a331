"""How an operation treats the layer axis: the axis along which a scan stacks.

An operation that treats it as a batch axis can be done layer by layer. Slices keep the
axis, with size one, so most parameters of an operation hold for a slice as they are.
"""

from collections.abc import Sequence
from typing import Any

from jaxmem import _compat
from jaxmem.ir.layer_rules import (
    CONSTRAINT,
    RULES,
    Axis,
    Treatment,
    broadcast_operand,
    is_plain_bitcast,
    is_to_memory,
    kept_axis,
    leaves_whole,
    operands_along,
)
from jaxmem.ir.primitives import ELEMENTWISE, VARYING


def treatment(eqn, axes: Sequence[Axis]) -> Treatment:
    """What `eqn` does to the layer axis, `axes` saying where its operands have it."""
    # Operands with None are not known to run along the layers; the treatment may ask
    # for them along an axis too.
    rule = RULES.get(eqn.primitive.name)
    if rule is None:
        return "it is not known to work layer by layer"
    # they would happen once for each layer
    if _compat.has_side_effects(eqn):
        return "it has side effects"
    if eqn.primitive.name != CONSTRAINT and _sharding(eqn) is not None:
        return "it names a sharding"
    return rule(eqn, axes)


def operand_axes(eqn, out_axis: int) -> tuple[Axis, ...] | None:
    """Along which axes the operands must be cut to make a slice of the output."""
    # None for an operation that is not worth repeating: only what costs next to nothing
    # has an answer.
    if eqn.primitive.name == CONSTRAINT:
        return (out_axis,) if leaves_whole(eqn, out_axis) else None
    if len(eqn.outvars) != 1 or _sharding(eqn) is not None:
        return None
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    alone = is_plain_bitcast(eqn) or is_to_memory(eqn)
    if name in ELEMENTWISE or name in VARYING or alone:
        return operands_along(eqn, out_axis)
    if name == "broadcast_in_dim":
        return broadcast_operand(eqn, out_axis)
    if name == "transpose":
        return (eqn.params["permutation"][out_axis],)
    if name == "reshape" and eqn.params["dimensions"] is None:
        axis = kept_axis(out.shape, eqn.invars[0].aval.shape, out_axis)
        return None if axis is None else (axis,)
    # counted along another axis, every layer has the same numbers
    if name == "iota" and eqn.params["dimension"] != out_axis:
        return ()
    return None


def _sharding(eqn):
    """A sharding that an equation asks for; transposed casts name that of no mesh."""
    sharding = eqn.params.get("sharding", eqn.params.get("out_sharding"))
    mesh = getattr(sharding, "mesh", None)
    return None if mesh is not None and mesh.empty else sharding


def narrow(eqn, outs: Sequence[Axis], size: int = 1) -> dict[str, Any]:
    """The parameters of `eqn` where its output has `size` layers along `outs[0]`."""
    params, name, axis = eqn.params, eqn.primitive.name, outs[0] if outs else None
    if name == CONSTRAINT:
        return params
    if name == "scan":
        return params | {"length": 1}
    if "sharding" in params:  # that of no mesh, and of the whole array's rank
        params = params | {"sharding": None}
    key = {"broadcast_in_dim": "shape", "iota": "shape", "reshape": "new_sizes"}
    if name in key and axis is not None:
        sizes = list(params[key[name]])
        sizes[axis] = size
        return params | {key[name]: tuple(sizes)}
    if name == "slice" and axis is not None:
        limits = list(params["limit_indices"])
        # `treatment` takes slices of all layers only: of some, it is those
        limits[axis] = size
        return params | {"limit_indices": tuple(limits)}
    return params
