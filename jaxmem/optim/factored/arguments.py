"""Checks of hyperparameters, and the tail of a chain that they make."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import PyTree

from jaxmem._checks import check_scalar, wrong_type
from jaxmem.optim._adama_arguments import check_mask, check_rate


def number(name: str, value: Any, **limits: Any) -> Any:
    """A Python number as it is; an array, as of `inject_hyperparams`, in float32."""
    value = check_scalar(name, value, **limits)
    return value.astype(jnp.float32) if isinstance(value, jax.Array) else value


def decay(name: str, value: Any) -> Any:
    """A decay rate in [0, 1)."""
    return number(name, value, at_least=0, below=1)


def pair(name: str, value: Any) -> tuple[Any, Any]:
    """Two numbers that are not negative."""
    if not isinstance(value, tuple | list) or len(value) != 2:
        raise wrong_type(name, value, "a pair of numbers")
    first, second = (number(f"{name}[{i}]", x, at_least=0) for i, x in enumerate(value))
    return first, second


def decayed_rate(
    learning_rate: Any,
    weight_decay: Any,
    mask: PyTree | Callable[[PyTree], PyTree] | None,
) -> optax.GradientTransformationExtraArgs:
    """Decoupled weight decay, then the learning rate."""
    rate = check_rate("learning_rate", learning_rate)
    return optax.chain(decayed(weight_decay, mask), optax.scale_by_learning_rate(rate))


def decayed(
    weight_decay: Any, mask: Any, names: tuple[str, str] = ("weight_decay", "mask")
) -> optax.GradientTransformation:
    """Adds the decayed weights; without decay it needs no parameters."""
    weight_decay = check_rate(names[0], weight_decay)
    check_mask(mask, names[1])
    none = isinstance(weight_decay, int | float) and weight_decay == 0
    return optax.identity() if none else optax.add_decayed_weights(weight_decay, mask)
