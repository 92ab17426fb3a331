"""A transformer over patches of images: Equinox modules of one example, `vmap`ped."""

from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, of_size


class Size(NamedTuple):
    batch: int
    patches: int
    features: int
    width: int
    heads: int
    layers: int


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout

    def __init__(self, width: int, heads: int, key):
        k = jax.random.split(key)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.attention = eqx.nn.MultiheadAttention(heads, width, key=k[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=k[1])
        self.dropout = eqx.nn.Dropout(0.1)

    def __call__(self, x, key):
        k = jax.random.split(key)
        y = jax.vmap(self.norms[0])(x)
        x = x + self.dropout(self.attention(y, y, y), key=k[0])
        y = jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))
        return x + self.dropout(y, key=k[1])


class Classifier(eqx.Module):
    """Logits of one image, given as patches [P, F]."""

    embed: eqx.nn.Linear
    positions: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, s: Size, key):
        k = jax.random.split(key, s.layers + 3)
        self.embed = eqx.nn.Linear(s.features, s.width, key=k[0])
        self.positions = 0.02 * jax.random.normal(k[1], (s.patches, s.width))
        self.blocks = [Block(s.width, s.heads, key) for key in k[3:]]
        self.norm = eqx.nn.LayerNorm(s.width)
        self.head = eqx.nn.Linear(s.width, 10, key=k[2])

    def __call__(self, patches, key):
        x = jax.vmap(self.embed)(patches) + self.positions
        keys = jax.random.split(key, len(self.blocks))
        for block, key in zip(self.blocks, keys, strict=True):
            x = block(x, key)
        return self.head(self.norm(jnp.mean(x, axis=0)))


def loss(model, images, labels, key):
    logits = jax.vmap(model)(images, jax.random.split(key, len(images)))
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make(size: str):
    s = of_size(size, small=Size(3, 4, 6, 8, 2, 1), big=Size(64, 196, 768, 512, 8, 4))
    tx = optax.lion(1e-4)

    @eqx.filter_jit
    def step(state, images, labels, key):
        model, moments = state
        value, grads = eqx.filter_value_and_grad(loss)(model, images, labels, key)
        params = eqx.filter(model, eqx.is_inexact_array)
        updates, moments = tx.update(grads, moments, params)
        return (eqx.apply_updates(model, updates), moments), value

    def init(key):
        k = jax.random.split(key, 4)
        model = Classifier(s, k[0])
        images = jax.random.normal(k[1], (s.batch, s.patches, s.features))
        labels = jax.random.randint(k[2], (s.batch,), 0, 10)
        moments = tx.init(eqx.filter(model, eqx.is_inexact_array))
        return (model, moments), images, labels, k[3]

    return step, arguments(size, init), (0,)
