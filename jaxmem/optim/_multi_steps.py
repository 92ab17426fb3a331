"""Gradient accumulation that runs the optimizer only when a mini-batch is complete.

`optax.MultiSteps` runs the wrapped update on every call and discards most of the
results. Here a branch runs it once a mini-batch, and an optimizer such as AdamA
accumulates in its own state, so that no gradient is stored.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike, DTypeLike
from jaxtyping import Array, Bool, PyTree

from jaxmem._checks import check_bool, check_dtype, check_int, shown
from jaxmem.optim.accumulation.dtypes import accumulation_dtype
from jaxmem.optim.accumulation.states import accumulates
from jaxmem.optim.accumulation.steps import (
    accumulate_step,
    apply_like,
    as_transformation,
)
from jaxmem.optim.accumulation.transformation import zeros_like


class MultiSteps:
    """`optax.MultiSteps` without the updates that are discarded.

    Each call of `update` takes one micro-batch; every k-th call returns updates, the
    others zeros. Methods and state (`optax.MultiStepsState`) are those of
    `optax.MultiSteps`, and so is the result for any optimizer without AdamA. If `opt`
    holds an AdamA (`jaxmem.optim.adama`) or another optimizer that accumulates,
    gradients go into its moments, k replaces its `micro_batches`, and `acc_grads` is
    empty; schedules and weight decay in `opt` act once a mini-batch.

    In `jaxmem.microbatch`, and under `accumulate_step` and `apply_step`, a call has n
    micro-batches: then an AdamA in `opt` takes mini-batches of k n of them, and the
    parameters move at every k-th step.

    Args:
      opt: an optax transformation.
      every_k_schedule: k, or a function that gives it for the number of updates so far.
      use_grad_mean: True takes the mean of k gradients, False their sum.
      accumulator_dtype: of the accumulated gradients; None for the parameters' own.
        Sums are computed in float32 or wider either way.

    Raises:
      TypeError: an argument of another kind; from `update`, a state that is not of
        `init`.
      ValueError: `every_k_schedule` less than 1; from `update`, an `opt` in which only
        some of the gradients go into an AdamA, see `accumulate_step`.

    Example::

      tx = jaxmem.optim.MultiSteps(jaxmem.adama(3e-4), every_k_schedule=8)
      state = tx.init(params)
      for micro_batch in data:  # the parameters move at every eighth
          grads = jax.grad(loss_fn)(params, micro_batch)
          updates, state = tx.update(grads, state, params)
          params = optax.apply_updates(params, updates)
    """

    def __init__(
        self,
        opt: optax.GradientTransformation,
        every_k_schedule: int | Callable[[Array], ArrayLike],
        *,
        use_grad_mean: bool = True,
        accumulator_dtype: DTypeLike | None = jnp.float32,
    ):
        if not callable(every_k_schedule):
            every_k_schedule = check_int("every_k_schedule", every_k_schedule, 1)
        if accumulator_dtype is not None:
            check_dtype("accumulator_dtype", accumulator_dtype, "inexact")
        self._opt = as_transformation("opt", opt)
        self._every_k = every_k_schedule
        self._use_grad_mean = check_bool("use_grad_mean", use_grad_mean)
        self._dtype = accumulator_dtype

    @property
    def inner_opt(self) -> optax.GradientTransformationExtraArgs:
        """The wrapped transformation."""
        return self._opt

    def init(self, params: PyTree) -> optax.MultiStepsState:
        """The initial state; `acc_grads` is empty for an AdamA."""
        inner = self._opt.init(params)
        zeros = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=self._dtype), params)
        return optax.MultiStepsState(
            mini_step=jnp.zeros((), jnp.int32),
            gradient_step=jnp.zeros((), jnp.int32),
            inner_opt_state=inner,
            acc_grads=() if accumulates(inner) else zeros,
        )

    def update(
        self,
        updates: PyTree,
        state: Any,
        params: PyTree | None = None,
        **extra_args: Any,
    ) -> tuple[PyTree, optax.MultiStepsState]:
        """Takes one micro-batch's gradient and returns zeros, or the updates of k.

        With an AdamA, the `phase`, `micro_batches`, `weight` and `keep` of
        `scale_by_adama` are those of one call in k.
        """
        _check_state(state)
        k = self._k(state.gradient_step)
        if not accumulates(state.inner_opt_state):
            step, waiting = self._in_sum(updates, state, params, extra_args)
        elif extra_args.get("phase") == "accumulate":
            return zeros_like(updates), state._replace(
                inner_opt_state=self._added(updates, state, params, k, **extra_args)
            )
        else:
            step, waiting = self._in_state(updates, state, params, k, **extra_args)
        emit = jnp.greater_equal(state.mini_step, k - 1)
        always = isinstance(k, int) and k == 1
        done, inner, acc = _when(True if always else emit, step, updates, waiting)
        return done, optax.MultiStepsState(
            mini_step=jnp.where(emit, 0, optax.safe_increment(state.mini_step)),
            gradient_step=jnp.where(
                emit, optax.safe_increment(state.gradient_step), state.gradient_step
            ),
            inner_opt_state=inner,
            acc_grads=acc,
            skip_state=state.skip_state,
        )

    def has_updated(self, state: Any) -> Bool[Array, ""]:
        """Whether the last call returned updates."""
        started = jnp.greater(state.gradient_step, 0)
        return jnp.logical_and(jnp.equal(state.mini_step, 0), started)

    def gradient_transformation(self) -> optax.GradientTransformationExtraArgs:
        """This as an optax transformation."""
        return optax.GradientTransformationExtraArgs(self.init, self.update)

    def _k(self, gradient_step):
        if not callable(self._every_k):
            return self._every_k
        k: Any = self._every_k(gradient_step)
        if isinstance(k, jax.Array):
            return k.astype(jnp.int32)
        is_integer = isinstance(k, float) and k.is_integer()
        return check_int("every_k_schedule(...)", int(k) if is_integer else k, 1)

    def _in_state(self, grads, state, params, k, phase=None, **extra_args):
        """(function that ends a mini-batch, (inner state, accumulated) otherwise)."""
        inner = state.inner_opt_state
        if phase != "apply":
            check_int("micro_batches", extra_args.get("micro_batches", 1), 1, 1)
            inner = self._added(grads, state, params, k, **extra_args)
        for name in ("micro_batches", "weight", "keep"):
            extra_args.pop(name, None)

        def step():
            return *apply_like(self._opt, grads, inner, params, **extra_args), ()

        return step, (inner, ())

    def _added(
        self, grads, state, params, k, *, micro_batches=1, weight=None, **extra_args
    ):
        """The state of `opt` with one more of the micro-batches of k calls."""
        extra_args.pop("phase", None)
        if not self._use_grad_mean:
            weight = 1 / micro_batches if weight is None else weight
        elif weight is not None:
            weight = weight / k
        extra_args |= {"micro_batches": k * micro_batches, "weight": weight}
        inner = state.inner_opt_state
        return accumulate_step(self._opt, grads, inner, params, **extra_args)

    def _in_sum(self, grads, state, params, extra_args):
        """The same as `_in_state`, with an accumulator."""
        add = _add_to_mean if self._use_grad_mean else _add
        total = jax.tree.map(
            lambda g, a: add(g, a, state.mini_step), grads, state.acc_grads
        )

        def step():
            mean = jax.tree.map(lambda t, g: t.astype(g.dtype), total, grads)
            inner = state.inner_opt_state
            updates, new = self._opt.update(mean, inner, params, **extra_args)
            return updates, new, jax.tree.map(jnp.zeros_like, state.acc_grads)

        stored = jax.tree.map(lambda t, a: t.astype(a.dtype), total, state.acc_grads)
        return step, (state.inner_opt_state, stored)


def _check_state(state) -> None:
    if not isinstance(state, optax.MultiStepsState):
        raise TypeError(
            f"MultiSteps: state={shown(state)}: the MultiStepsState of init, in "
            "update(updates, state, params)"
        )


def _when(emit, step, grads, waiting):
    """`step()` if `emit`, else zero updates and the states in `waiting`."""
    shapes = jax.eval_shape(step)[0]
    like = lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype)

    def run():
        updates, *states = step()
        return updates, *jax.tree.map(like, tuple(states), waiting)

    def wait():
        zeros = jax.tree.map(
            lambda g, s: jnp.zeros_like(g, dtype=s.dtype), grads, shapes
        )
        return zeros, *waiting

    return run() if emit is True else jax.lax.cond(emit, run, wait)


def _add(g, acc, n):
    del n
    dtype = accumulation_dtype(g, acc)
    return acc.astype(dtype) + g.astype(dtype)


def _add_to_mean(g, acc, n):
    """Welford's mean, as in optax: no sum can overflow the dtype."""
    dtype = accumulation_dtype(g, acc)
    acc = acc.astype(dtype)
    return acc + (g.astype(dtype) - acc) / (n + 1).astype(dtype)
