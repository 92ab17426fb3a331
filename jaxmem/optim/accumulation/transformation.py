"""Optax transformations made of an optimizer's own accumulation rule.

`accumulating_transformation` gives a rule the calling conventions that all optimizers
with such states share: the phases of a mini-batch, weights, devices, waiting updates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_bool, check_choice, check_count, check_scalar, shown
from jaxmem.optim._by_keys import held_by_keys
from jaxmem.optim.accumulation.devices import check_varying, per_device
from jaxmem.optim.accumulation.states import map_per_device, per_device_fields

PHASES = (None, "accumulate", "apply")


def accumulating_transformation(
    init: Callable[..., Any],
    accumulate: Callable[..., Any],
    apply: Callable[..., tuple[PyTree, Any]],
    *,
    check: Callable[..., None],
    micro_batches: int | Int32[Array, ""] = 1,
    axes: tuple[str, ...] = (),
) -> optax.GradientTransformationExtraArgs:
    """The transformation of an optimizer that accumulates into its own state.

    Its `update` takes the extra arguments `phase`, `micro_batches`, `weight` and
    `keep`, as `jaxmem.optim.scale_by_adama` describes. `accumulate` has to be
    elementwise, or at least leaf by leaf, so that `jaxmem.schedule` can move it into
    the backward pass; and it has no pass over the state that is not part of taking a
    gradient in. What decays once a mini-batch decays where `micro_step` is 0.

    Args:
      init: `(params) -> state`, of a class that `accumulating_state` has registered.
      accumulate: `(grads, state, n, weight, keep) -> state`, with one more micro-batch
        of n in it, counted in `micro_step`. A weight of None is 1/n; a keep of False
        takes the gradient for zeros, even where it is NaN; None is True.
      apply: `(grads, state, params) -> (updates, state)`, which ends the mini-batch:
        `count` advances, `micro_step` is 0. With `axes` it reduces the per-device
        fields over them. Of `grads` only the structure and the dtypes are known, except
        where a mini-batch is one call; `params` are None where the caller has none.
      check: `(updates, state, phase, n, weight, keep) -> None`, which raises TypeError
        for a state that is not of `init`, and for what this optimizer cannot do.
      micro_batches: n where a call does not say it.
      axes: mesh axes whose devices have micro-batches of their own.

    Returns:
      An `optax.GradientTransformationExtraArgs`.
    """
    default = check_count("micro_batches", micro_batches)

    def update(
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        *,
        phase: str | None = None,
        micro_batches: int | Int32[Array, ""] | None = None,
        weight: ArrayLike | None = None,
        keep: ArrayLike | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, Any]:
        del extra_args
        check_choice("phase", phase, PHASES)
        n = default if micro_batches is None else micro_batches
        n = check_count("micro_batches", n)
        check(updates, state, phase, n, weight, keep)
        _check_call(axes, phase, n, weight, keep)
        updates = jax.tree.map(jnp.asarray, updates)  # optax takes Python floats
        if phase == "apply":
            return apply(updates, state, params)
        if micro_batches is not None:
            state = state._replace(micro_batches=jnp.array(n, jnp.int32))
        if axes and phase is None:  # no scan carries it
            state = map_per_device(lambda tree: per_device(tree, axes), state)
        check_varying(updates, per_device_fields(state), axes)
        state = accumulate(updates, state, n, weight, keep)
        if phase == "accumulate":
            return zeros_like(updates), state
        done = apply(updates, state, params)
        if is_one(n):
            return done
        waiting = zeros_like(updates), state
        return select(state.micro_step >= n, done, waiting)

    return held_by_keys(optax.GradientTransformationExtraArgs(init, update))


def chain_after(
    accumulating: optax.GradientTransformation,
    tail: optax.GradientTransformation,
    micro_batches: int | Int32[Array, ""],
) -> optax.GradientTransformationExtraArgs:
    """An accumulating transformation and what acts on its updates, once a mini-batch.

    Args:
      accumulating: of `accumulating_transformation`.
      tail: an `optax.chain`.
      micro_batches: as given to `accumulating`.

    Returns:
      A transformation with a chain's state: that of `accumulating`, those of `tail`.
    """
    head: Any = optax.with_extra_args_support(accumulating)

    def init(params: PyTree) -> Any:
        rest: Any = tail.init(params)
        return (head.init(params), *rest)

    def update(
        updates: PyTree, state: Any, params: PyTree | None = None, **extra_args: Any
    ) -> tuple[PyTree, Any]:
        first = state[0] if isinstance(state, tuple) and state else state
        updates, first = head.update(updates, first, params, **extra_args)
        phase, rest = extra_args.get("phase"), state[1:]
        if phase != "accumulate":
            stepped: Any = tail.update(updates, rest, params)
            updates, rest = stepped
        given = extra_args.get("micro_batches")
        if phase is None and not is_one(micro_batches if given is None else given):
            waiting = zeros_like(updates), state[1:]
            updates, rest = select(first.micro_step == 0, (updates, rest), waiting)
        return updates, (first, *rest)

    return optax.GradientTransformationExtraArgs(init, update)


def zeros_like(tree: PyTree) -> Any:
    return jax.tree.map(jnp.zeros_like, tree)


def is_one(n: Any) -> bool:
    """Whether there is one micro-batch, as far as that is known."""
    return isinstance(n, int) and n == 1


def select(condition, chosen, other):
    """One of two trees: cheaper than a branch where both are computed anyway."""
    # An array that is in both trees stays as it is.
    pick = lambda x, y: x if x is y else jnp.where(condition, x, y)
    return jax.tree.map(pick, chosen, other)


def _check_call(axes, phase, n, weight, keep) -> None:
    if axes and phase is None and not is_one(n):
        raise ValueError(
            f"axis_name with micro_batches={n!r} and no phase: between two calls the "
            "state would differ from device to device; use jaxmem.optim.start_step, "
            "accumulate_step and apply_step"
        )
    if weight is not None:
        check_scalar("weight", weight)
    if keep is not None and not isinstance(keep, jax.Array):
        check_bool("keep", keep)
    elif keep is not None and (keep.shape != () or keep.dtype != jnp.bool_):
        raise TypeError(f"keep={shown(keep)}: a bool, or a scalar array of one")
