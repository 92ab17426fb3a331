"""Arguments of layers checked where the layer is made, not only when it runs."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem._checks import (
    check_bool,
    check_callable,
    check_choice,
    check_float,
    check_int,
)

NORMS = ("pre", "post")

_seen: set[str] = set()  # options that an op has taken already; layers are made often


def _ask(op: Callable, shapes: dict[str, tuple[int, ...]], **options: Any) -> None:
    """Raises what the op itself says of these options, on shapes alone."""
    asked = f"{op.__name__}{options!r}"  # tracing takes milliseconds
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


def check_sampled_dense(budget: Any, method: Any) -> None:
    """How many rows a `SampledDense` keeps, and how it chooses them."""
    shapes = {"x": (4, 1), "kernel": (1, 1), "key": (2,)}
    _ask(ops.sampled_dense, shapes, budget=budget, method=method)


def check_velora(groups: Any, scale: Any) -> None:
    """The parts of a `VeLoRADense`'s features, and its factor."""
    check_int("groups", groups, 1)
    check_float("scale", scale)


def check_heads(width: int, num_heads: int, num_kv_heads: int | None = None) -> None:
    """Errors for heads that do not divide the width, or each other."""
    check_int("width", width, 1)
    check_int("num_heads", num_heads, 1)
    if width % num_heads:
        raise ValueError(f"num_heads={num_heads} does not divide the width {width}")
    if num_kv_heads is not None:
        check_int("num_kv_heads", num_kv_heads, 1)
        if num_heads % num_kv_heads:
            raise ValueError(
                f"num_kv_heads={num_kv_heads} does not divide num_heads={num_heads}"
            )


def check_transformer(given: Mapping[str, Any]) -> None:
    """The arguments of a `TransformerBlock`, but for its width and dtypes."""
    check_int("num_heads", given["num_heads"], 1)
    if given["mlp_dim"] is not None:
        check_int("mlp_dim", given["mlp_dim"], 1)
    check_choice("norm", given["norm"], NORMS)
    check_callable("activation", given["activation"])
    for name in ("causal", "use_bias"):
        check_bool(name, given[name])
    for name in ("dropout_rate", "attention_dropout_rate"):
        if given[name] is not None or name == "dropout_rate":
            check_float(name, given[name], at_least=0, at_most=1)
    check_float("epsilon", given["epsilon"], at_least=0)


def check_llama(given: Mapping[str, Any]) -> None:
    """The arguments of a `LlamaBlock`, but for its width and dtypes."""
    heads = check_int("num_heads", given["num_heads"], 1)
    check_heads(heads, heads, given["num_kv_heads"])
    check_int("mlp_dim", given["mlp_dim"], 1)
    check_float("rope_theta", given["rope_theta"], above=0)
    check_float("epsilon", given["epsilon"], at_least=0)
