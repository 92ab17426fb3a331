"""A Llama block in Flax nnx that keeps what its products keep anyway, once.

As `transformer_blocks.py`, which has more forms, in linen.
"""

from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

import jaxmem
from jaxmem import nn, ops


def rotary_embedding(x, theta: float = 10_000.0):
    """Rotary embedding of `[batch, length, heads, channels]`: arXiv 2104.09864."""
    half = x.shape[-1] // 2
    rate = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle = jnp.outer(jnp.arange(x.shape[1], dtype=jnp.float32), rate)[None, :, None]
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    turned = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)
    return turned.astype(x.dtype)


class LlamaBlock(nnx.Module):
    """RMSNorm, grouped causal attention with rotary embedding, RMSNorm, SwiGLU.

    Saves: as that of linen.
    """

    def __init__(
        self,
        width: int,
        num_heads: int,
        mlp_dim: int,
        *,
        num_kv_heads: int,
        dtype: Any = None,
        rngs,
    ):
        how = {"dtype": dtype, "rngs": rngs}
        queries, keys = ((n, width // num_heads) for n in (num_heads, num_kv_heads))
        general = lambda *sizes, **more: nn.nnx.LinearGeneral(
            *sizes, use_bias=False, **more, **how
        )
        linear = lambda *sizes: nn.nnx.Linear(*sizes, use_bias=False, **how)
        norm = lambda: nn.nnx.RMSNorm(width, save="output", **how)
        self.attention_norm, self.mlp_norm = norm(), norm()
        self.query = general(width, queries)
        self.key, self.value = general(width, keys), general(width, keys)
        self.out = general(queries, width, axis=(-2, -1))
        self.gate, self.up = linear(width, mlp_dim), linear(width, mlp_dim)
        self.down = linear(mlp_dim, width)

    def attention(self, x):
        q, k, v = self.query(x), self.key(x), self.value(x)
        q, k = rotary_embedding(q), rotary_embedding(k)
        return self.out(ops.dot_product_attention(q, k, v, is_causal=True))

    def mlp(self, x):
        # keeps both projections, and not their product
        down = lambda down, gate, up: down(ops.swiglu(gate, up))
        keep = {"policy": jax.checkpoint_policies.nothing_saveable}
        down = nnx.remat(down, prevent_cse=False, **keep)
        return down(self.down, self.gate(x), self.up(x))

    def __call__(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


def main() -> None:
    x = jnp.ones((2, 128, 256), jnp.bfloat16)
    block = LlamaBlock(
        256, 4, 1024, num_kv_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    )
    graph, params = nnx.split(block)
    loss = lambda params, x: jnp.mean(nnx.merge(graph, params)(x) ** 2)
    print(jaxmem.residuals(loss, params, x))
    grads = jax.jit(jax.grad(loss))(params, x)
    print(f"gradients of {len(jax.tree.leaves(grads))} arrays")


if __name__ == "__main__":
    main()
