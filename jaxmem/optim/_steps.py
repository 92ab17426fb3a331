"""The two halves of a mini-batch, for any optax transformation that holds an AdamA.

(And, on several devices under `jax.shard_map`, what goes before them.)

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

from jaxmem._checks import check_count, shown
from jaxmem.optim._dependence import depends_on_input
from jaxmem.optim._devices import AxisName, axis_names, check_whole, count_devices, own
from jaxmem.optim._moments import AdamAState


def as_transformation(name: str, tx: Any) -> optax.GradientTransformationExtraArgs:
    """`tx` with extra arguments, a MultiSteps object by its `gradient_transformation`.

    TypeError for what is no optax transformation.
    """
    if not (callable(getattr(tx, "init", None)) and hasattr(tx, "update")):
        raise TypeError(f"{name}={shown(tx)}: an optax.GradientTransformation")
    whole: Any = getattr(tx, "gradient_transformation", None)
    given: Any = whole() if callable(whole) else tx
    return optax.with_extra_args_support(given)


def contains_adama(state: PyTree) -> bool:
    """Whether an `AdamAState` is somewhere in an optimizer's state."""
    leaves = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, AdamAState))
    return any(isinstance(s, AdamAState) for s in leaves)


def start_step(
    state: PyTree, params: PyTree, axis_name: AxisName
) -> tuple[PyTree, PyTree]:
    """Starts a mini-batch under `jax.shard_map`, for an AdamA with an `axis_name`.

    Types the moments as each device's own from here on, so that a scan over
    micro-batches carries them with one type, and with them a copy of the parameters to
    take gradients with respect to. (The gradient with respect to replicated parameters
    is a sum over the devices, an all-reduce a micro-batch.) No data moves, and under
    `check_vma=False` this does nothing.

    Args:
      state: of a transformation that holds an AdamA, replicated over the axis.
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
          state, own = start_step(state, params, "data")

          def body(state, batch):
              grads = jax.grad(loss)(own, batch)
              return accumulate_step(tx, grads, state, params, micro_batches=8), None

          state, _ = jax.lax.scan(body, state, micro_batches)
          updates, state = apply_step(tx, state, params)
          return optax.apply_updates(params, updates), state
    """
    _need_adama(state)
    names = axis_names(axis_name)
    if not names:
        raise TypeError(f"axis_name={axis_name!r}: a name or a tuple of names")
    count_devices(names)

    def begun(s):
        if not isinstance(s, AdamAState):
            return s
        check_whole({"mu": s.mu, "nu": s.nu}, names)
        return s._replace(mu=own(s.mu, names), nu=own(s.nu, names))

    check_whole({"params": params}, names)
    is_adama = lambda s: isinstance(s, AdamAState)
    return jax.tree.map(begun, state, is_leaf=is_adama), own(params, names)


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
      micro_batches: N, in place of the one AdamA was made with; with an `axis_name`,
        of this device.
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
    _check_multi_steps(state)
    micro_batches = check_count("micro_batches", micro_batches)
    update = as_transformation("tx", tx).update
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
    it keeps its state. With an `axis_name` this is where the devices' moments become
    one, by an all-reduce of both.

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
    update = as_transformation("tx", tx).update
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
            f"state={shown(state)} holds no AdamAState: use jaxmem.optim.adama or "
            "scale_by_adama in tx, or jaxmem.optim.MultiSteps, for any optimizer"
        )


def _check_multi_steps(state) -> None:
    """ValueError for optax's MultiSteps round an AdamA: the state is no other's."""
    is_multi = lambda s: isinstance(s, optax.MultiStepsState)
    for s in filter(is_multi, jax.tree.leaves(state, is_leaf=is_multi)):
        if contains_adama(s.inner_opt_state) and jax.tree.leaves(s.acc_grads):
            raise ValueError(
                "tx is an optax.MultiSteps round an AdamA, which keeps gradients in an "
                "accumulator of its own and loses those of micro-batches: use "
                "jaxmem.optim.MultiSteps, or the AdamA without either"
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
