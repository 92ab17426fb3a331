"""What the adapters of linen and nnx that merge tiers have in common."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem._checks import (
    check_array,
    check_callable,
    check_dtype,
    check_int,
    wrong_type,
    wrong_value,
)

Tiers = jax.Array | Sequence[jax.Array]
Params = Mapping[str, jax.Array]
_TINY = 1e-8  # added to norms that are divided by, as in the authors' code
_GATE_TEMPERATURE = 0.1

NAME = "MultiTierAdapter"


def check_adapter(layer: Any) -> None:
    """The options of a `MultiTierAdapter`."""
    check_int(f"{NAME}: reduction", layer.reduction, 1)
    check_callable(f"{NAME}: gate_init", layer.gate_init)
    for name in ("dtype", "param_dtype"):
        if (dtype := getattr(layer, name)) is not None:
            check_dtype(f"{NAME}: {name}", dtype)


def check_tiers(tiers: Any) -> jax.ShapeDtypeStruct:
    """The shape of a stack of all tiers, and their dtype."""
    name, several = f"{NAME}: tiers", "two tiers or more, of one shape and dtype"
    if not isinstance(tiers, Sequence):
        if not hasattr(tiers, "shape"):
            raise wrong_type(name, tiers, "a list of arrays, or one array")
        found = check_array(name, tiers, "floating")
        if found.ndim < 2 or found.shape[0] < 2:
            raise wrong_value(name, found.shape, several)
        return jax.ShapeDtypeStruct(found.shape, found.dtype)
    each = [check_array(name, x, "floating") for x in tiers]
    types = [(x.shape, x.dtype.name) for x in each]
    if len(types) < 2 or len(set(types)) > 1 or not each[0].ndim:
        raise wrong_value(name, types, several)
    return jax.ShapeDtypeStruct((len(each), *each[0].shape), each[0].dtype)


def parameters(tiers: int, width: int, layer: Any) -> dict[str, tuple[Callable, tuple]]:
    """How each parameter is drawn, and its shape."""
    narrow = width // layer.reduction
    if not narrow:
        allowed = f"at most the size of the last axis, {width}"
        raise wrong_value(f"{NAME}: reduction", layer.reduction, allowed)
    kernel = jax.nn.initializers.lecun_normal()
    each = jax.nn.initializers.lecun_normal(batch_axis=0)
    zeros, ones = jax.nn.initializers.zeros, jax.nn.initializers.ones
    return {
        "down": (each, (tiers, width, narrow)),
        "down_bias": (zeros, (tiers, narrow)),
        "norm_scale": (ones, (tiers, narrow)),
        "norm_bias": (zeros, (tiers, narrow)),
        "weigh": (kernel, (narrow, 1)),
        "weigh_bias": (zeros, (1,)),
        "up": (kernel, (narrow, width)),
        "up_bias": (zeros, (width,)),
        "out_scale": (ones, (width,)),
        "out_bias": (zeros, (width,)),
        "gate": (layer.gate_init, ()),
    }


@functools.partial(jax.checkpoint, static_argnums=2)
def merge(params: Params, tiers: Tiers, dtype: Any) -> jax.Array:
    """The input of the first late layer.

    All of it is recomputed from the tiers: the gradient of "down" needs these anyway.
    """
    with jax.named_scope(NAME):
        p = {name: x.astype(dtype) for name, x in params.items()}
        h = _narrow(p, tiers, dtype)
        weights = weights_of(p, h)[..., None].astype(dtype)
        merged = jnp.sum(weights * h[:-1], 0) + h[-1]
        y = jax.nn.relu(merged) @ p["up"]
        y = _norm(y + _as_rows(p["up_bias"], y), p["out_scale"], p["out_bias"], 1e-12)
        gate = jnp.tanh(params["gate"].astype(jnp.float32) / _GATE_TEMPERATURE)
        return y + gate.astype(dtype) * tiers[-1].astype(dtype)


def _narrow(p: Params, tiers: Tiers, dtype: Any) -> jax.Array:
    """Each tier through its own dense layer and norm: [n, ..., r]."""
    if isinstance(tiers, Sequence):  # of which no stack is made
        pairs = zip(tiers, p["down"], strict=True)
        h = jnp.stack([x.astype(dtype) @ kernel for x, kernel in pairs])
    else:
        h = jnp.einsum("n...d,ndr->n...r", tiers.astype(dtype), p["down"])
    h = h + _as_tiers(p["down_bias"], h)
    scale, bias = (_as_tiers(p[name], h) for name in ("norm_scale", "norm_bias"))
    return _norm(h, scale, bias, 1e-5)


def weights_of(p: Params, h: jax.Array) -> jax.Array:
    """[n - 1, ...]: of each tier but the last, to sum 1 (0 if none is similar to it).

    The similarity to the last tier, over the redundancy: the sum of a tier's cosines
    with all of them, its own too; what is below 0 counts as 0 in both.
    """
    early, last = h[:-1], h[-1:]
    similar = ((early * last) @ p["weigh"])[..., 0]
    similar = jax.nn.relu(similar + _as_rows(p["weigh_bias"], similar))
    wide = early.astype(jnp.float32)
    unit = wide / (jnp.linalg.norm(wide, axis=-1, keepdims=True) + _TINY)
    cosines = jnp.einsum("i...r,j...r->ij...", unit, unit)
    weights = similar.astype(jnp.float32) / jax.nn.relu(cosines).sum(1)
    return weights / (weights.sum(0, keepdims=True) + _TINY)


def _norm(x: jax.Array, scale: jax.Array, bias: jax.Array, epsilon: float) -> jax.Array:
    y = jax.nn.standardize(x.astype(jnp.float32), epsilon=epsilon).astype(x.dtype)
    return y * _as_rows(scale, x) + _as_rows(bias, x)


def _as_rows(p: jax.Array, x: jax.Array) -> jax.Array:
    """With axes of 1 before its own, as many as x has."""
    return jnp.expand_dims(p, range(x.ndim - p.ndim))


def _as_tiers(p: jax.Array, x: jax.Array) -> jax.Array:
    """[n, r] as [n, 1, ..., 1, r]."""
    return jnp.expand_dims(p, range(1, x.ndim - 1))
