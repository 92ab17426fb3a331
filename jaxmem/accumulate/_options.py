"""What `microbatch` was asked for, checked once, when the step is made."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jaxmem.optim._devices import axis_names


@dataclasses.dataclass(frozen=True)
class Options:
    n: int
    has_aux: bool = False
    has_model_state: bool = False
    weight_fn: Callable | None = None
    remat: bool | Callable = False
    skip_nonfinite: str | None = None
    accumulator_dtype: Any = None
    clip: str | None = None
    axis_name: tuple[str, ...] = ()
    donate: bool = True


def check_options(loss_fn, tx, n, *, skip_nonfinite, axis_name, **options) -> Options:
    """The options as plain data, or an error that names the argument."""
    if not callable(loss_fn):
        raise TypeError(f"loss_fn must be a function, got {loss_fn!r}")
    if not (hasattr(tx, "init") and hasattr(tx, "update")):
        raise TypeError(f"tx must be an optax.GradientTransformation, got {tx!r}")
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ValueError(f"n={n!r}: the number of micro-batches, an int of at least 1")
    options |= {
        "skip_nonfinite": _skip(skip_nonfinite),
        "axis_name": axis_names(axis_name),
    }
    checked = Options(n, **options)
    _check_functions(checked)
    _check_accumulator(checked.accumulator_dtype)
    if checked.clip not in (None, "two_pass"):
        raise ValueError(f"clip={checked.clip!r}: None or 'two_pass'")
    for name in ("has_aux", "has_model_state", "donate"):
        if not isinstance(getattr(checked, name), bool):
            raise TypeError(f"{name}={getattr(checked, name)!r}: True or False")
    return checked


def _skip(value) -> str | None:
    """`True` is the check that costs nothing."""
    if isinstance(value, bool):
        return "loss" if value else None
    if value not in ("loss", "gradients"):
        raise ValueError(
            f"skip_nonfinite={value!r}: False, True, 'loss' or 'gradients'"
        )
    return value


def _check_functions(options: Options) -> None:
    if not isinstance(options.remat, bool) and not callable(options.remat):
        raise TypeError(
            f"remat={options.remat!r}: True, False or a policy of "
            "jax.checkpoint_policies"
        )
    if options.weight_fn is not None and not callable(options.weight_fn):
        raise TypeError(f"weight_fn={options.weight_fn!r}: a function of a micro-batch")


def _check_accumulator(dtype) -> None:
    if dtype is not None and not jnp.issubdtype(jnp.dtype(dtype), jnp.inexact):
        raise ValueError(f"accumulator_dtype={dtype!r}: a floating dtype")
