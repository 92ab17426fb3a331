"""An operation on a part of its arrays."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir.axis_labels import Axis, resized
from jaxmem.ir.random_parts import bits_of_part
from jaxmem.ir.types import JaxprEqn


def on_part(
    eqn: JaxprEqn,
    args: Sequence[Any],
    ins: Sequence[Axis],
    outs: Sequence[Axis],
    length: Callable[[int], int],
    start: Callable[[int], Any],
) -> list[Any]:
    """What an equation gives of parts of its operands.

    Args:
      eqn: an equation with labels (`axis_labels.labels`).
      args: what there is of each operand.
      ins: along which axis each operand is cut; None for one that is whole.
      outs: the same for the outputs.
      length: of an axis of this length in the equation, the length of its part.
      start: of the same, where the part starts; it may be traced. Where the part is of
        several places, a number for each of its elements.
    """
    name, whole = eqn.primitive.name, lambda axis: eqn.outvars[0].aval.shape[axis]
    first = lambda axis, dtype: _along(
        start(whole(axis)).astype(dtype), axis, eqn.outvars[0].aval.ndim
    )
    # bits depend on an element's place in the whole array
    if name == "random_bits" and outs[0] is not None and ins[0] is None:
        axis = outs[0]
        how = axis, length(whole(axis)), first(axis, jnp.uint32)
        return [_compat.in_context_of(eqn, partial(bits_of_part, eqn, args[0], *how))]
    new = _compat.bind(eqn, list(args), resized(eqn, ins, outs, length))
    if name == "iota" and outs[0] == eqn.params["dimension"]:
        new = [new[0] + first(outs[0], new[0].dtype)]
    return new


def _along(x: Any, axis: int | None, rank: int) -> Any:
    """A number as it is; an array of them along an axis of an array of this rank."""
    others = [d for d in range(rank) if d != axis]
    return lax.expand_dims(x, others) if x.ndim else x
