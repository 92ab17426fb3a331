"""A loss that takes the examples of its batch together, told of where it is split."""

import logging
import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.accumulate._options import StepOptions
from jaxmem.optim.accumulation import axis_text

_SHOWN = 3  # operations that a message names


def tell_of_examples_together(
    loss_fn: Callable, options: StepOptions, params, model_state, batch, rng
) -> None:
    """Names the operations of a loss that is no mean over its examples.

    A warning where gradients are others than those of the whole batch by what the user
    can change: with a mesh, and without one for a quotient of sums, which `weight_fn`
    is for. For others a line in the log "jaxmem" at level INFO: batch norm in
    micro-batches is what it is.
    """
    found = _examples_together(loss_fn, options, params, model_state, batch, rng)
    if options.weight_fn is not None:
        found = [one for one in found if not one.of_sums]
    told = [one for one in found if one.of_sums or options.mesh is not None]
    rest = [one for one in found if one not in told]
    if told:
        warnings.warn(_text(told, options), stacklevel=2)
    if rest:
        logging.getLogger("jaxmem").info(_text(rest, options))


def _examples_together(loss_fn, options, params, model_state, batch, rng) -> list[Any]:
    from jaxmem.scheduling.tiling.together import together

    first = jax.tree.leaves(batch)[0]
    examples = first.shape[0] // options.n
    parts = examples if options.n > 1 or options.axis_name else 1
    if options.mesh is not None:
        parts = math.prod(options.mesh.shape[name] for name in options.axis_name)
    if parts < 2:
        return []
    bare = lambda x, shape: jax.ShapeDtypeStruct(shape, x.dtype)
    whole = lambda tree: jax.tree.map(lambda x: bare(x, x.shape), tree)
    micro = jax.tree.map(lambda x: bare(x, (examples, *x.shape[1:])), batch)
    args = whole(params), whole(model_state), micro, whole(rng)
    loss = lambda *args: loss_fn(*args)[0]
    closed = _compat.without_dead_code(jax.make_jaxpr(loss)(*args))
    before = len(jax.tree.leaves(args[:2]))
    given = range(before, before + len(jax.tree.leaves(micro)))
    return list(together(closed, given, parts))


def _text(found: Sequence[Any], options: StepOptions) -> str:
    where = f"one of {options.n} micro-batches"
    if options.axis_name:
        axes = axis_text(options.axis_name)
        where = f"one device's part of {where} (axis_name={axes})"
    lines = "".join(f"\n  {one.text}" for one in found[:_SHOWN])
    if len(found) > _SHOWN:
        lines += f"\n  and {len(found) - _SHOWN} more"
    text = (
        f"microbatch: the loss takes the examples of a batch together, of which it is "
        f"given {where}, so its gradient is not that of the whole batch:{lines}"
    )
    if any(one.of_sums for one in found):
        text += (
            "\nA mean over the tokens that count is that of the whole batch with "
            "weight_fn=lambda batch: (the number of those tokens)"
        )
    return text
