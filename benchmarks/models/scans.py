"""Three stacks of eight layers in `lax.scan`: an MLP, a pre-norm matmul, attention.

Inside a scan XLA cannot fold a kept intermediate away, so what an op keeps is what the
step takes; this is how deep JAX models are written.
"""

import jax
import jax.numpy as jnp

SDS = jax.ShapeDtypeStruct


def _sum_of_squares(x):
    return jnp.sum(jnp.square(x.astype(jnp.float32)))


def mlp(activation, layers=8, tokens=4096, width=1024, hidden=4096, dtype=jnp.bfloat16):
    """(loss, args) of x -> activation(x W) V, `layers` times."""

    def loss(weights, x):
        body = lambda x, w: (activation(x @ w[0]) @ w[1], None)
        return _sum_of_squares(jax.lax.scan(body, x, weights)[0])

    weights = (
        SDS((layers, width, hidden), dtype),
        SDS((layers, hidden, width), dtype),
    )
    return loss, (weights, SDS((tokens, width), dtype))


def pre_norm(norm, layers=8, tokens=4096, width=4096, dtype=jnp.bfloat16):
    """(loss, args) of x -> x + norm(x, scale, bias) W, `layers` times."""

    def loss(weights, x):
        body = lambda x, w: (x + norm(x, w[1], w[2]) @ w[0], None)
        return _sum_of_squares(jax.lax.scan(body, x, weights)[0])

    affine = SDS((layers, width), jnp.float32)
    weights = (SDS((layers, width, width), dtype), affine, affine)
    return loss, (weights, SDS((tokens, width), dtype))


def attention(attend, layers=8, batch=8, length=512, heads=16, head_dim=64):
    """(loss, args) of x -> attend(q, k, v, key) W, q k v projected from x."""
    dtype, width = jnp.bfloat16, heads * head_dim

    def body(x, w):
        (project_in, project_out), key = w
        qkv = (x @ project_in).reshape(*x.shape[:2], 3 * heads, head_dim)
        q, k, v = jnp.split(qkv, 3, axis=2)
        y = attend(q, k, v, jax.random.wrap_key_data(key))
        return y.reshape(x.shape) @ project_out, None

    def loss(weights, x, keys):
        return _sum_of_squares(jax.lax.scan(body, x, (weights, keys))[0])

    weights = (
        SDS((layers, width, 3 * width), dtype),
        SDS((layers, width, width), dtype),
    )
    keys = SDS((layers, 2), jnp.uint32)
    return loss, (weights, SDS((batch, length, width), dtype), keys)
