"""A mini-batch in steps: start, accumulate each micro-batch, apply.

They work for any optax transformation that holds an accumulating optimizer, such as
AdamA. The whole transformation runs on every micro-batch and once at the end; then each
part of its state is taken from the run that was meant for it.
"""

from collections import OrderedDict
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from jaxtyping import Array, Int32, PyTree

from jaxmem._checks import check_axis_name, check_count, shown
from jaxmem.optim.accumulation.dependence import dependent_paths
from jaxmem.optim.accumulation.devices import (
    AxisName,
    check_replicated,
    count_devices,
    per_device,
)
from jaxmem.optim.accumulation.states import (
    accumulates,
    is_accumulating,
    map_accumulating,
    map_per_device,
    per_device_fields,
)


def as_transformation(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """`tx` with extra arguments, also of a MultiSteps object; or a TypeError."""
    if not (callable(getattr(tx, "init", None)) and hasattr(tx, "update")):
        raise TypeError(f"{name}={shown(tx)}: an optax.GradientTransformation")
    convert: Any = getattr(tx, "gradient_transformation", None)
    transformation: Any = convert() if callable(convert) else tx
    return optax.with_extra_args_support(transformation)


def start_step(
    state: PyTree, params: PyTree, axis_name: AxisName
) -> tuple[PyTree, PyTree]:
    """Starts a mini-batch under `jax.shard_map`, for an AdamA with an `axis_name`.

    The moments are typed as varying over the devices from here on, so that a scan over
    micro-batches carries them with one type. The parameters that are returned are typed
    so too: take gradients with respect to them. (The gradient with respect to
    replicated parameters is a sum over the devices, an all-reduce a micro-batch.) No
    data moves, and under `check_vma=False` this function does nothing.

    Args:
      state: of a transformation that holds an AdamA (or another accumulating
        optimizer), replicated over the axis.
      params: the parameters, replicated over the axis.
      axis_name: what AdamA was given.

    Returns:
      (state, params): the state for `accumulate_step`, the parameters for `jax.grad`.
      `apply_step` and `optax.apply_updates` take the parameters as they were.

    Raises:
      ValueError: no AdamA in `state`; no such axis here; moments or parameters that
        vary over it already.

    Example::

      tx = jaxmem.optim.adama(3e-4, axis_name="data")

      def step(params, state, micro_batches):  # in shard_map over "data"
          state, local = jaxmem.optim.start_step(state, params, "data")

          def body(state, batch):
              grads = jax.grad(loss_fn)(local, batch)
              state = jaxmem.optim.accumulate_step(
                  tx, grads, state, params, micro_batches=8
              )
              return state, None

          state, _ = jax.lax.scan(body, state, micro_batches)
          updates, state = jaxmem.optim.apply_step(tx, state, params)
          return optax.apply_updates(params, updates), state

      step = jax.shard_map(step, mesh=mesh, in_specs=(P(), P(), P()), out_specs=P())
      micro_batches = jnp.stack([batch] * 8)
      params, state = step(params, tx.init(params), micro_batches)
    """
    _check_accumulates(state)
    axes = check_axis_name("axis_name", axis_name)
    if not axes:
        raise TypeError(f"axis_name={axis_name!r}: a name or a tuple of names")
    count_devices(axes)

    def started(s):
        check_replicated(per_device_fields(s), axes)
        return map_per_device(lambda tree: per_device(tree, axes), s)

    check_replicated({"params": params}, axes)
    return map_accumulating(started, state), per_device(params, axes)


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
      tx: any optax transformation, nested in any way, that holds an AdamA (or another
        accumulating optimizer).
      grads: the gradient of the mean loss of this micro-batch.
      state: of `tx`.
      params: as for `tx.update`.
      micro_batches: N, instead of the one AdamA was made with; with an `axis_name`,
        of this device.
      weight: scalar instead of 1/N, see `scale_by_adama`.
      keep: bool scalar; False takes this gradient for zeros, even where it is NaN.
      **extra_args: for other transformations in `tx`.

    Returns:
      The new state.

    Raises:
      ValueError: `tx` holds no AdamA, or has parameters whose gradients reach none, as
        in `optax.partition({"a": adama(...), "b": optax.sgd(...)}, ...)`: they would be
        lost, since only AdamA keeps them. A trace of the update decides: no update may
        depend on the gradient during accumulation. A group of `optax.set_to_zero()`
        passes.
    """
    _check_accumulates(state)
    _check_multi_steps(state)
    micro_batches = check_count("micro_batches", micro_batches)
    update = as_transformation("tx", tx).update
    extra_args |= {"micro_batches": micro_batches, "weight": weight, "keep": keep}

    def run(grads):
        return update(grads, state, params, phase="accumulate", **extra_args)

    _check_nothing_is_lost(lambda g: run(g)[0], grads, state)
    return _merged(state, run(grads)[1], accumulating=True)


def apply_step(
    tx: optax.GradientTransformation, state: PyTree, params: PyTree, **extra_args: Any
) -> tuple[PyTree, PyTree]:
    """Ends a mini-batch: the updates of the accumulated moments.

    AdamA and the transformations after it in its chain advance by one step, those
    before it keep their states. With an `axis_name` an all-reduce of both moments
    combines those of the devices.

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
    _check_accumulates(state)
    zeros = jax.tree.map(jnp.zeros_like, like)
    update = as_transformation("tx", tx).update
    updates, new = update(zeros, state, params, phase="apply", **extra_args)
    return updates, _merged(state, new, accumulating=False)


def _merged(old, new, *, accumulating: bool):
    """The old state where a transformation has to wait, else the new one."""
    if is_accumulating(old):
        return new
    if not accumulates(old):
        return old if accumulating else new
    if type(old) is tuple:
        return tuple(_merged_chain(list(old), list(new), accumulating))
    if isinstance(old, OrderedDict):
        states = _merged_chain(list(old.values()), list(new.values()), accumulating)
        return OrderedDict(zip(old, states, strict=True))
    return jax.tree.map(
        lambda o, n: _merged(o, n, accumulating=accumulating),
        old,
        new,
        is_leaf=lambda s: s is not old,  # one level down
    )


def _merged_chain(old: list, new: list, accumulating: bool) -> list:
    # What is before the accumulating transformation in a chain sees the gradients of
    # micro-batches, what is after it sees the step. A chain's state is a plain tuple (a
    # named chain's an OrderedDict), so the position tells which is which.
    holders = [i for i, s in enumerate(old) if accumulates(s)]
    states = []
    for i, (o, n) in enumerate(zip(old, new, strict=True)):
        if i in holders:
            states.append(_merged(o, n, accumulating=accumulating))
        elif i < holders[0]:
            states.append(n if accumulating else o)
        elif i > holders[-1] or not jax.tree.leaves(o):
            states.append(o if accumulating else n)
        else:
            raise ValueError(
                f"entry {i} of a chain has a state and stands between two that "
                "accumulate: it is unclear whether it advances with each micro-batch "
                "or with each mini-batch; move it before the first or after the last"
            )
    return states


def _check_accumulates(state) -> None:
    if not accumulates(state):
        raise ValueError(
            f"state={shown(state)} holds no AdamAState, nor another that accumulates: "
            "use jaxmem.optim.adama or scale_by_adama in tx, or "
            "jaxmem.optim.MultiSteps, for any optimizer"
        )


def _check_multi_steps(state) -> None:
    """ValueError for optax's own MultiSteps around an accumulating optimizer."""
    is_multi = lambda s: isinstance(s, optax.MultiStepsState)
    for s in filter(is_multi, jax.tree.leaves(state, is_leaf=is_multi)):
        if accumulates(s.inner_opt_state) and jax.tree.leaves(s.acc_grads):
            raise ValueError(
                "tx is an optax.MultiSteps around an optimizer that accumulates by "
                "itself: it keeps gradients in an accumulator of its own and loses "
                "those of micro-batches; use jaxmem.optim.MultiSteps, or the inner "
                "optimizer without either"
            )


def _check_nothing_is_lost(updates_of, grads, state) -> None:
    """ValueError for gradients that no accumulating optimizer takes in."""
    lost = dependent_paths(updates_of, grads)
    if not lost:
        return
    groups = _groups_without_accumulation(state)
    named = f"; optax.partition groups without AdamA: {groups}" if groups else ""
    others = f" and {len(lost) - 5} more" if len(lost) > 5 else ""
    raise ValueError(
        f"the gradients of {', '.join(lost[:5])}{others} do not all go into an AdamA "
        f"and would be lost, since nothing else keeps a micro-batch{named}. Give these "
        "parameters an AdamA, freeze them with optax.set_to_zero(), or accumulate "
        "their gradients yourself. A wrapper that decides by the gradient's values "
        "(optax.apply_if_finite: pass keep= instead) or does not pass extra arguments "
        "on cannot be accumulated either"
    )


def _groups_without_accumulation(state) -> list:
    is_partition = lambda s: isinstance(s, optax.MultiTransformState)
    leaves = jax.tree.leaves(state, is_leaf=is_partition)
    return [
        label
        for partition in filter(is_partition, leaves)
        for label, inner in partition.inner_states.items()
        if not accumulates(inner)
    ]
