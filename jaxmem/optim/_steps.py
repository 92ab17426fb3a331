"""The two halves of a mini-batch, for any optax transformation that holds an AdamA.

The whole transformation runs on every micro-batch and once at the end; then each part
of its state is taken from the run that was meant for it. What stands before AdamA in a
chain sees the gradients of micro-batches, what stands after it sees the step. A chain's
state is a plain tuple (a named chain's an OrderedDict), so position tells.
"""

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem.optim._dependence import depends_on_input
from jaxmem.optim._moments import AdamAState


def contains_adama(state: PyTree) -> bool:
    """Whether an `AdamAState` is somewhere in an optimizer's state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, AdamAState))
    return any(isinstance(s, AdamAState) for s in leaves)


def accumulate_step(
    tx: optax.GradientTransformation,
    grads: PyTree,
    state: PyTree,
    params: PyTree | None,
    *,
    micro_batches: int | Int32[Array, ""],
    weight: ArrayLike | None = None,
    keep: ArrayLike | None = None,
    **extra_args: Any,
) -> PyTree:
    """Takes one micro-batch into the moments of every AdamA in `tx`.

    Parameters do not change. Transformations before AdamA in its chain (clipping, say)
    act on this micro-batch's gradient and advance; those after it (weight decay,
    schedules), and the counts of wrappers such as `optax.inject_hyperparams`, stay.

    Args:
      tx: any optax transformation, nested in any way, that holds an AdamA.
      grads: the gradient of the mean loss of this micro-batch.
      state: of `tx`.
      params: as for `tx.update`.
      micro_batches: N, in place of the one AdamA was made with.
      weight: scalar in place of 1/N, see `scale_by_adama`.
      keep: bool scalar; False takes this gradient for zeros, even where it is NaN.
      **extra_args: for other transformations in `tx`.

    Returns:
      The new state.

    Raises:
      ValueError: `tx` holds no AdamA, or has parameters whose gradients reach none, as
        in `optax.partition({"a": adama(...), "b": optax.sgd(...)}, ...)`: they would be
        lost, since only AdamA keeps what a micro-batch brings. This is read off a
        trace: no update may depend on the gradient during accumulation. A group of
        `optax.set_to_zero()` passes.
    """
    _need_adama(state)
    update = optax.with_extra_args_support(tx).update
    extra_args |= {"micro_batches": micro_batches, "weight": weight, "keep": keep}

    def run(grads):
        return update(grads, state, params, phase="accumulate", **extra_args)

    _check_nothing_is_lost(lambda g: run(g)[0], grads, state)
    return _merged(state, run(grads)[1], accumulating=True)


def apply_step(
    tx: optax.GradientTransformation,
    state: PyTree,
    params: PyTree,
    **extra_args: Any,
) -> tuple[PyTree, PyTree]:
    """Ends a mini-batch: the updates of the accumulated moments.

    AdamA and what stands after it in its chain advance by one step, what stands before
    it keeps its state.

    Args:
      tx: the transformation that `accumulate_step` was called with.
      state: what `accumulate_step` returned for the last micro-batch.
      params: the parameters; the updates have their dtypes.
      **extra_args: for other transformations in `tx`.

    Returns:
      (updates, state).

    Raises:
      ValueError: `tx` holds no AdamA.
    """
    return apply_like(tx, params, state, params, **extra_args)


def apply_like(
    tx, like: PyTree, state: PyTree, params: PyTree | None, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """`apply_step` with the updates' structure and dtypes from `like`."""
    _need_adama(state)
    zeros = jax.tree.map(jnp.zeros_like, like)
    update = optax.with_extra_args_support(tx).update
    updates, new = update(zeros, state, params, phase="apply", **extra_args)
    return updates, _merged(state, new, accumulating=False)


def _merged(old, new, *, accumulating: bool):
    """The old state where a part has to wait, else the new one."""
    if isinstance(old, AdamAState):
        return new
    if not contains_adama(old):
        return old if accumulating else new
    if type(old) is tuple:
        return tuple(_merged_chain(list(old), list(new), accumulating))
    if isinstance(old, OrderedDict):
        parts = _merged_chain(list(old.values()), list(new.values()), accumulating)
        return OrderedDict(zip(old, parts, strict=True))
    return jax.tree.map(
        lambda o, n: _merged(o, n, accumulating=accumulating),
        old,
        new,
        is_leaf=lambda s: s is not old,  # one level down
    )


def _merged_chain(old: list, new: list, accumulating: bool) -> list:
    holders = [i for i, s in enumerate(old) if contains_adama(s)]
    parts = []
    for i, (o, n) in enumerate(zip(old, new, strict=True)):
        if i in holders:
            parts.append(_merged(o, n, accumulating=accumulating))
        elif i < holders[0]:
            parts.append(n if accumulating else o)
        elif i > holders[-1] or not jax.tree.leaves(o):
            parts.append(o if accumulating else n)
        else:
            raise ValueError(
                f"entry {i} of a chain has a state and stands between two that hold an "
                "AdamA: it is unclear whether it advances with each micro-batch or "
                "with each mini-batch; move it before the first or after the last"
            )
    return parts


def _need_adama(state) -> None:
    if not contains_adama(state):
        raise ValueError(
            "the state holds no AdamAState: use jaxmem.optim.adama or scale_by_adama "
            "in tx, or jaxmem.optim.MultiSteps, which takes any optimizer"
        )


def _check_nothing_is_lost(updates_of, grads, state) -> None:
    """ValueError for gradients that go past AdamA."""
    jaxpr, updates = jax.make_jaxpr(updates_of, return_shape=True)(grads)
    paths = jax.tree_util.tree_flatten_with_path(updates)[0]
    past = zip(paths, depends_on_input(jaxpr), strict=True)
    lost = [jax.tree_util.keystr(path) for (path, _), depends in past if depends]
    if not lost:
        return
    groups = _groups_without_adama(state)
    named = f"; optax.partition groups without AdamA: {groups}" if groups else ""
    more = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    raise ValueError(
        f"the gradients of {', '.join(lost[:5])}{more} do not all go into an AdamA and "
        f"would be lost, since nothing else keeps a micro-batch{named}. Give these "
        "parameters an AdamA, freeze them with optax.set_to_zero(), or accumulate "
        "their gradients yourself. A wrapper that decides by the gradient's values "
        "(optax.apply_if_finite: pass keep= instead) or does not pass extra arguments "
        "on cannot be accumulated either"
    )


def _groups_without_adama(state) -> list:
    is_partition = lambda s: isinstance(s, optax.MultiTransformState)  # noqa: E731
    found = jax.tree.leaves(state, is_leaf=is_partition)
    partitions = [s for s in found if is_partition(s)]
    return [
        label
        for partition in partitions
        for label, inner in partition.inner_states.items()
        if not contains_adama(inner)
    ]
