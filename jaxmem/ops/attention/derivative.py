"""The derivative of attention, whatever computes it: what is kept, and for whom.

Kept: q, k, v, the output, and two float32 a row and head (its maximum and the
logarithm of its sum); with dropout a key of eight bytes. A kernel and the XLA path keep
the same, so the forward pass may be the one and the backward pass the other.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem.ops.attention import codes as codes
from jaxmem.ops.attention.block import Extras
from jaxmem.ops.attention.kernels import (
    AttentionCall,
    backward,
    forward,
    reads_value_as_it_is,
)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def attend(call: AttentionCall, q, k, v, bias, extras: Extras):
    """The output, [b, t, n, h], and its codes or None."""
    o = forward(call, q, k, v, bias, extras)[0]
    return o, codes.code({"o": o}, call.save)["o"] if call.save else None


def _stored(call: AttentionCall, q, k, v, bias, extras: Extras):
    """`v` [b, s, n, h] as it is kept, [b, n, s h]: the rows of a head lie together."""
    if reads_value_as_it_is(call, q, k, bias, extras):
        return v
    b, s, n, h = v.shape
    # The backward pass multiplies by it in that order. XLA:GPU would keep it as the
    # forward product had it, and copy the whole stack between a scan over layers and
    # its backward scan; with positions and channels in one axis it has no choice.
    return jnp.swapaxes(v, 1, 2).reshape(b, n, s * h)


def _restored(v, length: int):
    """The inverse of `_stored`."""
    if v.ndim == 4:
        return v
    return jnp.swapaxes(v.reshape(*v.shape[:2], length, -1), 1, 2)


def _attend_forward(call, q, k, v, bias, extras):
    inputs = {"q": q, "k": k, "v": v, "bias": bias}
    wanted = {name for name, x in inputs.items() if x is not None and x.perturbed}
    q, k, v, bias, extras = jax.tree.map(
        lambda x: x.value,
        (q, k, v, bias, extras),
        is_leaf=lambda x: isinstance(x, jax.custom_derivatives.CustomVJPPrimal),
    )
    names = ("output", "row_max", "row_log_sum")
    o, top, log_total = (
        checkpoint_name(x, f"jaxmem_attention_{name}")
        for name, x in zip(names, forward(call, q, k, v, bias, extras), strict=True)
    )
    coded = codes.code({"o": o}, call.save)["o"] if call.save else None
    saved = {"q": q, "k": k, "top": top, "log_total": log_total, "bias": bias}
    if wanted - {"v"}:
        saved |= {
            "v": _stored(call, q, k, v, bias, extras),
            "o": coded if call.save else o,
        }
    saved = codes.code(saved, call.save)
    # a dict of no arrays: residuals may carry their structure, not strings
    return (o, coded), (dict.fromkeys(wanted), saved | extras._asdict())


def _attend_backward(call, residuals, g):
    wanted, saved = residuals
    saved, g = codes.recall(saved, g[0])
    if isinstance(g, jax.custom_derivatives.SymbolicZero):
        g = jnp.zeros(g.shape, g.dtype)  # pyright: ignore[reportArgumentType]
    with jax.named_scope("jaxmem.dot_product_attention"):
        if "v" in saved:
            saved = saved | {"v": _restored(saved["v"], saved["k"].shape[1])}
        grads = backward(call, frozenset(wanted), saved, g)
    return *(grads.get(name) for name in ("q", "k", "v", "bias")), None


attend.defvjp(_attend_forward, _attend_backward, symbolic_zeros=True)
