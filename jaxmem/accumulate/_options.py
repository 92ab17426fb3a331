"""The options of `microbatch`, checked once, when the step is made."""

import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jaxmem._checks import (
    check_axis_name,
    check_bool,
    check_callable,
    check_choice,
    check_dtype,
    check_int,
    wrong_type,
)
from jaxmem.accumulate._tables import check_tables


@dataclasses.dataclass(frozen=True)
class StepOptions:
    """The arguments of `microbatch` beside the loss and the optimizer."""

    n: int
    has_aux: bool = False
    has_model_state: bool = False
    weight_fn: Callable | None = None
    remat: bool | Callable = False
    skip_nonfinite: str | None = None
    accumulator_dtype: Any = None
    clip: str | None = None
    tables: Any = None
    axis_name: tuple[str, ...] = ()
    donate: bool = True
    mesh: Mesh | AbstractMesh | None = None  # to map the step over `axis_name`


def check_options(
    loss_fn, tx, n, *, skip_nonfinite, axis_name, **options
) -> StepOptions:
    """The options as plain data, or an error that names the argument."""
    check_callable("loss_fn", loss_fn)
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise wrong_type("tx", tx, "an optax.GradientTransformation")
    n = check_int("n", n, 1)
    options |= {
        "skip_nonfinite": _skip(skip_nonfinite),
        "axis_name": check_axis_name("axis_name", axis_name),
    }
    checked = StepOptions(n, **options)
    _check_functions(checked)
    if checked.accumulator_dtype is not None:
        check_dtype("accumulator_dtype", checked.accumulator_dtype, "inexact")
    check_tables(checked.tables)
    _check_mesh(checked)
    check_choice("clip", checked.clip, (None, "two_pass"))
    for name in ("has_aux", "has_model_state", "donate"):
        check_bool(name, getattr(checked, name))
    _check_loss(loss_fn, checked.has_model_state)
    return checked


def _check_loss(loss_fn: Callable, has_model_state: bool) -> None:
    """TypeError for a function that cannot be called as a loss is."""
    names = ("params", *(("model_state",) * has_model_state), "batch", "rng")
    try:
        signature = inspect.signature(loss_fn)
    except (TypeError, ValueError):  # some callables have none
        return
    try:
        signature.bind(*names)
    except TypeError as error:
        wanted = ", ".join(names)
        hint = "; that of an nnx module has none" if has_model_state else ""
        raise TypeError(
            f"loss_fn{signature}: {error}; it is called with ({wanted}){hint}: write "
            f"`lambda {wanted}: ...`, also where rng is not used (it is None if the "
            "step gets none)"
        ) from None


def _check_mesh(options: StepOptions) -> None:
    mesh = options.mesh
    if mesh is None:
        return
    if not isinstance(mesh, Mesh | AbstractMesh):
        raise wrong_type("mesh", mesh, "a jax.sharding.Mesh, or None")
    if not options.axis_name:
        raise ValueError(
            "mesh: name the axes over which the batch is spread, axis_name='data'"
        )
    missing = [name for name in options.axis_name if name not in mesh.axis_names]
    if missing:
        raise ValueError(
            f"axis_name={missing[0]!r}: the mesh has the axes {mesh.axis_names}"
        )


def _skip(value) -> str | None:
    """`True` is the check that costs nothing."""
    choices = (False, True, "loss", "gradients")
    value = check_choice("skip_nonfinite", value, choices)
    return {False: None, True: "loss"}.get(value, value)


def _check_functions(options: StepOptions) -> None:
    if not isinstance(options.remat, bool):
        allowed = "True, False or a policy of jax.checkpoint_policies"
        check_callable("remat", options.remat, allowed)
    if options.weight_fn is not None:
        check_callable("weight_fn", options.weight_fn, "a function of a micro-batch")
