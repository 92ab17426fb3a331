"""Two ways to take in a micro-batch's gradient: into the moments, or into a sum.

Their arithmetic is elementwise and leaf by leaf, the carry is the moments themselves,
and no pass over them comes before the scan: so a scheduler may move the additions into
the backward pass over the layers, and XLA keeps one buffer from the first micro-batch
to the last. On several devices either is each device's own until the scan is over, and
then reduced once.
"""

import contextlib
import functools
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxmem.accumulate import _own_moments
from jaxmem.accumulate._devices import Axes, mean
from jaxmem.accumulate._options import Options
from jaxmem.accumulate._trees import choose, tree_bytes, wide
from jaxmem.memory import format_bytes
from jaxmem.optim import accumulate_step, apply_step, contains_adama
from jaxmem.optim._devices import own

_LOGGER = logging.getLogger("jaxmem")


class Way(NamedTuple):
    """`start` is the carry before the first micro-batch, `add(carry, grads, share,
    keep)` takes in a gradient, `finish(carry, taken)` gives the updates and the new
    state, the old one if no micro-batch was kept. A share of None is 1/n, None for
    `keep` and `taken` is always.
    """

    start: Any
    add: Callable
    finish: Callable


def way_for(tx, params, opt_state, options: Options) -> Way:
    """The moments where AdamA is in the state, else a sum, which the log tells of.

    One micro-batch is a plain step, with nothing before its gradient to add it to.
    """
    adama = contains_adama(opt_state)
    if adama and options.accumulator_dtype is not None:
        raise ValueError(
            f"accumulator_dtype={options.accumulator_dtype!r}: AdamA has no "
            "accumulator; its moments have the dtypes mu_dtype and nu_dtype"
        )
    if adama and options.axis_name:
        return _into_own_moments(tx, params, opt_state, options)
    if options.n == 1 and not options.axis_name:
        extra = {"micro_batches": 1} if adama else {}
        finish = functools.partial(_update, tx, params, opt_state, **extra)
        return Way(None, lambda _, grads, share, keep: grads, finish)
    into = _into_moments if adama else _into_sum
    return into(tx, params, opt_state, options)


def _update(tx, params, opt_state, grads, taken, **extra):
    update = optax.with_extra_args_support(tx).update
    updates, new_state = update(grads, opt_state, params, **extra)
    return updates, choose(taken, new_state, opt_state)


def _into_own_moments(tx, params, opt_state, options: Options) -> Way:
    start = _own_moments.begin(tx, params, opt_state, options)
    add = functools.partial(_own_moments.add, tx, params, options)
    finish = functools.partial(_own_moments.finish, tx, params, opt_state, options)
    return Way(start, add, finish)


def _into_moments(tx, params, opt_state, options: Options) -> Way:
    def add(state, grads, share, keep):
        added = accumulate_step(
            tx, grads, state, params, micro_batches=options.n, weight=share
        )
        return choose(keep, added, state)

    def finish(state, taken):
        updates, new_state = apply_step(tx, state, params)
        return updates, choose(taken, new_state, state)

    return Way(opt_state, add, finish)


def _into_sum(tx, params, opt_state, options: Options) -> Way:
    def finish(total, taken):
        total = mean(total, options.axis_name)
        # the dtypes that jax.grad gives, which the optimizer's state is made for
        grads = jax.tree.map(lambda g, p: g.astype(p.dtype), total, params)
        return _update(tx, params, opt_state, grads, taken)

    zeros = jax.tree.map(lambda p: _zeros(p, options.accumulator_dtype), params)
    zeros = own(zeros, options.axis_name)
    if options.n > 1:  # else there is no loop that would carry them
        _tell_of(zeros, options.n)
    return Way(zeros, functools.partial(_add, options.n), finish)


def _zeros(param, dtype):
    return jnp.zeros_like(param, dtype=wide(param.dtype) if dtype is None else dtype)


def _add(n: int, total, grads, share, keep):
    """The products in float32 or wider, rounded once to the accumulator's dtype."""

    def add(t, g):
        g = g.astype(wide(g.dtype))
        part = g / n if share is None else g * share.astype(g.dtype)
        return t + part.astype(t.dtype)

    return choose(keep, jax.tree.map(add, total, grads), total)


@contextlib.contextmanager
def naming_axis(axes: Axes):
    """An AdamA that misses its devices: the error says which argument is missing."""
    try:
        yield
    except ValueError as error:
        if axes or "axis_name=" not in str(error):
            raise
        raise ValueError(
            f"{error}. A step of microbatch(axis_name=...), with the axis_name that "
            "AdamA has, does what is needed"
        ) from error


def _tell_of(zeros, n: int) -> None:
    say(
        "microbatch: there is no AdamA in the optimizer's state, so the gradients of "
        f"n={n} micro-batches are summed in an accumulator of "
        f"{format_bytes(tree_bytes(zeros))}, which jaxmem.optim.adama does without"
    )


@functools.cache  # once a process
def say(message: str) -> None:
    """To the log of jaxmem, at level INFO."""
    _LOGGER.info(message)
