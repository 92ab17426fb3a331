"""What the transformer blocks of linen and nnx share.

A block keeps what its matmuls keep anyway, once. In unrolled layers XLA may keep the
recomputed activation after all; in a scan over layers it cannot.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxmem import ops


def activated_dense(
    activation: Callable[..., Array], inputs: Sequence[Array], kernel, bias, dtype
):
    """`dense(activation(*inputs))` that keeps the inputs and not the activation."""

    def run(inputs, kernel):
        return ops.dense(activation(*inputs), kernel, dtype=dtype)

    # A GELU in D -> F -> D keeps one [N, F] and not two, a SwiGLU two and not three,
    # and no matmul is done twice.
    y = jax.checkpoint(run, prevent_cse=False)(tuple(inputs), kernel)
    return y if bias is None else y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)


def attend(qkv, mask, positions, *, rope_theta, causal, rate, rng):
    """Attention of `[batch, length, heads, channels]` arrays, rotated where asked."""
    q, k, v = qkv
    if rope_theta is not None:
        if positions is None:
            positions = jnp.arange(q.shape[-3])
        q, k = (rotary_embedding(y, positions, rope_theta) for y in (q, k))
    return ops.dot_product_attention(
        *(q, k, v),
        mask=mask,
        is_causal=causal,
        dropout_rate=rate,
        # Called only here: without dropout there need not be a key.
        dropout_rng=rng() if rate else None,
    )


def residual_pair(place: str, x: Array, norms, layers) -> Array:
    """Attention and MLP, each with its norm before it ("pre") or after the sum."""
    for norm, layer in zip(norms, layers, strict=True):
        x = x + layer(norm(x)) if place == "pre" else norm(x + layer(x))
    return x


def rotary_embedding(
    x: Float[Array, "*batch length heads channels"],
    positions: Int[Array, "*#batch length"],
    theta: float = 10_000.0,
) -> Float[Array, "*batch length heads channels"]:
    """Rotary position embedding, halves of the channels paired: arXiv 2104.09864."""
    half = x.shape[-1] // 2
    positions = positions.reshape(
        *[1] * (x.ndim - 2 - positions.ndim), *positions.shape
    )
    rate = float(theta) ** (-jnp.arange(half, dtype=jnp.float32) / half)
    rate = rate.reshape(*[1] * (x.ndim - 1), half)
    angle = positions[..., None, None].astype(jnp.float32) * rate
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)
