"""Low-rank adapters on a frozen decoder: the gradient is of the adapters alone.

After Hu et al. 2021. The frozen weights have half the width of the adapters' dtype.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size, training_step


class Size(NamedTuple):
    batch: int
    length: int
    width: int
    heads: int
    layers: int
    rank: int
    vocabulary: int


ADAPTED = ("query", "value", "up")


def adapted(x, frozen, adapter, name):
    """x W, and what the adapter of W adds, if it has one."""
    y = x @ frozen[name]
    if name not in adapter:
        return y
    a, b = (w.astype(x.dtype) for w in adapter[name])
    return y + 2.0 * (x @ a) @ b


def norm(x):
    wide = x.astype(float)
    scale = jax.lax.rsqrt(jnp.mean(wide**2, axis=-1, keepdims=True) + 1e-6)
    return (wide * scale).astype(x.dtype)


def block(x, frozen, adapter, heads: int):
    linear = lambda x, name: adapted(x, frozen, adapter, name)
    split = lambda x: x.reshape(*x.shape[:2], heads, -1)
    y = norm(x)
    q, k, v = (split(linear(y, name)) for name in ("query", "key", "value"))
    y = jax.nn.dot_product_attention(q, k, v, is_causal=True)
    x = x + linear(y.reshape(x.shape), "out")
    return x + linear(jax.nn.gelu(linear(norm(x), "up")), "down")


def make(size: str):
    s = of_size(
        size,
        small=Size(2, 5, 8, 2, 2, 2, 11),
        big=Size(4, 512, 1024, 16, 8, 16, 8192),
    )
    tx = optax.adamw(1e-4, weight_decay=0.01)
    half = jnp.bfloat16 if size == "big" else float

    def loss(adapters, frozen, tokens):
        def body(x, layer):
            return block(x, *layer, s.heads), None

        x = frozen["embedding"][tokens[:, :-1]]
        x, _ = jax.lax.scan(body, x, (frozen["layers"], adapters))
        logits = (norm(x) @ frozen["embedding"].T).astype(float)
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(logits, tokens[:, 1:]).mean()

    def init(key):
        k = jax.random.split(key, 12)
        square, n = (s.layers, s.width, s.width), s.layers
        layers = {
            name: dense(key, *square)
            for name, key in zip(("query", "key", "value", "out"), k, strict=False)
        }
        layers["up"] = dense(k[4], n, s.width, 4 * s.width)
        layers["down"] = dense(k[5], n, 4 * s.width, s.width)
        adapters = {
            name: (dense(key, n, s.width, s.rank), jnp.zeros((n, s.rank, last)))
            for name, key in zip(ADAPTED, k[6:], strict=False)
            for last in [layers[name].shape[-1]]
        }
        embedding = dense(k[9], s.width, s.vocabulary).T
        frozen = {"layers": layers, "embedding": embedding}
        frozen = jax.tree.map(lambda w: w.astype(half), frozen)
        tokens = jax.random.randint(k[10], (s.batch, s.length + 1), 0, s.vocabulary)
        return (adapters, tx.init(adapters)), frozen, tokens

    return training_step(loss, tx), arguments(size, init), (0,)
