"""Arguments of layers checked where the layer is made, not only when it runs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem._checks import (
    check_bool,
    check_choice,
    check_float,
    check_int,
    check_numbers,
    wrong_value,
)
from jaxmem.nn._velora import METHODS

_seen: set[str] = set()  # options that an op has taken already; layers are made often


def _ask(op: Callable, shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
    """Raises what the op itself says of these options, on shapes alone."""
    asked = f"{op.__name__}{[*shapes]}{options!r}"  # tracing takes milliseconds
    if asked in _seen:
        return
    dtypes = {"key": jnp.uint32}
    arrays = {
        name: jax.ShapeDtypeStruct(shape, dtypes.get(name, jnp.float32))
        for name, shape in shapes.items()
    }
    jax.eval_shape(lambda arrays: op(**arrays, **options), arrays)
    _seen.add(asked)


def check_abn(activation: Any, negative_slope: Any, alpha: Any, approximate: Any):
    """The activation of an `InPlaceABN` and its numbers."""
    check_float("negative_slope", negative_slope, above=0)
    check_float("alpha", alpha, above=0)
    check_bool("approximate", approximate)
    _ask(ops.inplace_abn, {"x": (2, 1)}, activation=activation)


def check_ms_save(save: Any) -> None:
    """What an MS norm keeps."""
    _ask(ops.ms_rms_norm, {"x": (2, 1)}, save=save)


def check_sampled_dense(budget: Any, method: Any, norm_cache: Any) -> None:
    """How many rows a `SampledDense` keeps, how it chooses them, whose norms it has."""
    shapes = {"x": (4, 1), "kernel": (1, 1), "key": (2,)}
    _ask(ops.sampled_dense, shapes, budget=budget, method=method)
    if norm_cache is None:
        return
    sizes = check_numbers("norm_cache", norm_cache, "a number of samples, or a shape")
    if not sizes or min(sizes) < 1:
        raise wrong_value("norm_cache", norm_cache, "one size or more, each at least 1")
    shapes |= {"x": (4, 1), "norm_cache": (4,)}
    _ask(ops.sampled_dense, shapes, budget=budget, method=method)


def check_velora(groups: Any, scale: Any, method: Any, decay: Any) -> None:
    """The parts of a `VeLoRADense`'s features, its factor, where its vector is from."""
    check_int("groups", groups, 1)
    check_float("scale", scale)
    check_choice("method", method, METHODS)
    check_float("decay", decay, at_least=0, below=1)


def check_mesa(groups: Any, bits: Any, decay: Any) -> None:
    """The groups of a `MesaDense`'s features, bits of their codes, the average."""
    check_int("groups", groups, 1)
    shapes = {"x": (groups,), "ranges": (2, groups)}
    _ask(ops.stored_in_ranges, shapes, bits=bits, decay=decay)
