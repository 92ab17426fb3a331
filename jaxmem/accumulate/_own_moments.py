"""AdamA whose micro-batches are spread over devices: moments of each device's own.

A turn of the scan that some devices leave out is one with a zero gradient for them;
one that all leave out is none, and leaves the state alone. That takes a scalar of all
devices in every turn, and in return nothing of the state differs between devices but
the moments, and no copy of those is needed for a mini-batch that comes to nothing.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax

from jaxmem.accumulate._devices import any_of, said
from jaxmem.accumulate._options import Options
from jaxmem.accumulate._trees import choose
from jaxmem.optim import (
    AdamAState,
    accumulate_step,
    apply_step,
    contains_adama,
    start_step,
)
from jaxmem.optim._dependence import depends_on_input


def begin(tx, params, opt_state, options: Options):
    """The carry, with moments typed as each device's own."""
    is_multi = lambda s: isinstance(s, optax.MultiStepsState)
    multi = filter(is_multi, jax.tree.leaves(opt_state, is_leaf=is_multi))
    if any(contains_adama(s) for s in multi):
        raise ValueError(
            f"microbatch(axis_name={said(options.axis_name)}) with a MultiSteps round "
            "an AdamA: between two steps its moments would be each device's own; pass "
            "the AdamA itself, and a larger n"
        )
    state, params = start_step(opt_state, params, options.axis_name)
    _check_reduced(tx, params, state, options)
    _check_alike(tx, params, state, options)
    return state


def add(tx, params, options: Options, state, grads, share, keep):
    n = options.n
    added = accumulate_step(
        tx, grads, state, params, micro_batches=n, weight=share, keep=keep
    )
    return choose(any_of(keep, options.axis_name), added, state)


def finish(tx, params, opt_state, options: Options, state, taken):
    """(updates, state), replicated; zeros and the state as it was if none was taken."""

    def step(state):
        return apply_step(tx, state, params)

    def stay(state):
        like = jax.eval_shape(step, state)[0]
        # equal on all devices, so the largest is each of them, to the bit
        same = lambda x: jax.lax.pmax(x, options.axis_name)
        same_moments = lambda old, s: old._replace(
            mu=jax.tree.map(same, s.mu), nu=jax.tree.map(same, s.nu)
        )
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like)
        return zeros, _adama(same_moments, opt_state, state)

    return step(state) if taken is None else jax.lax.cond(taken, step, stay, state)


def _adama(fn: Callable, state, *others):
    """`fn` of every AdamAState; the first tree's own where there is none."""
    is_adama = lambda s: isinstance(s, AdamAState)
    each = lambda s, *rest: fn(s, *rest) if is_adama(s) else s
    return jax.tree.map(each, state, *others, is_leaf=is_adama)


def _check_reduced(tx, params, state, options: Options) -> None:
    """AdamA has the axes too: its end of a mini-batch is a reduction over them."""
    traced = jax.make_jaxpr(lambda s: apply_step(tx, s, params))(state)
    reduced = {getattr(effect, "name", None) for effect in traced.effects}
    if missing := {*options.axis_name} - reduced:
        raise ValueError(
            f"microbatch(axis_name={said(options.axis_name)}), but the AdamA in tx "
            f"does not reduce its moments over {sorted(missing)}: give it the same "
            "axis_name"
        )


def _check_alike(tx, params, state, options: Options) -> None:
    """No state but AdamA's may follow a gradient: it would differ by device."""

    def others(grads):
        new = accumulate_step(tx, grads, state, params, micro_batches=options.n)
        return _adama(lambda s: None, new)

    traced, shapes = jax.make_jaxpr(others, return_shape=True)(params)
    paths = [path for path, _ in jax.tree.leaves_with_path(shapes)]
    follows = zip(paths, depends_on_input(traced), strict=True)
    if found := [jax.tree_util.keystr(path) for path, depends in follows if depends]:
        raise ValueError(
            f"opt_state{found[0]} depends on the gradients of micro-batches, so with "
            f"axis_name={said(options.axis_name)} it would differ from device to "
            "device: no transformation before AdamA may keep such a state there"
        )
