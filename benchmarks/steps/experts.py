"""Train steps of DeepSeek-V3's mixtures of experts, no token dropped, with AdamW.

A layer is a norm, a router, eight of 256 experts for a token, and the expert that all
tokens have. A device has a quarter of the experts for its own tokens and those of three
others: with room for every choice, its buffers have eight rows for each of these tokens
(`benchmarks.models.moe.ragged_shards`). Parameters and moments, in float32, are spread
over all devices; the experts' weights are gathered for a layer. Layers compute in
bfloat16.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from benchmarks.models.moe import (
    BALANCE,
    BOTH,
    DATA,
    EXPERT,
    gated_mlp,
    mapped,
    ragged_shards,
)
from benchmarks.models.parallel import pin
from benchmarks.steps.devices import placed
from benchmarks.steps.tiles import BF16, F32, SDS, Made, norm
from benchmarks.steps.train import train_step

WIDTH, HIDDEN, EXPERTS, CHOICES = 7168, 2048, 256, 8
_ROUTED = ("gate", "up", "down")


def layer(mixer: Callable, keep: Callable, x, w):
    """A layer of [batch, tokens, width], and what balances its experts."""
    w = jax.tree.map(lambda a: a.astype(BF16), w)
    x = keep(x)
    y = norm(x, w["n"])
    routed, more = mixer(y, w)
    shared = {name: w[f"shared {name}"] for name in _ROUTED}
    return keep(x + routed + gated_mlp(jnp.matmul, y, shared)), more


def parameters(layers: int):
    """Shapes in float32."""
    inner = {"gate": (WIDTH, HIDDEN), "up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    shapes = {name: (EXPERTS, *shape) for name, shape in inner.items()}
    shapes |= {f"shared {name}": shape for name, shape in inner.items()}
    shapes |= {"n": (WIDTH,), "router": (WIDTH, EXPERTS)}
    return {name: SDS((layers, *shape), F32) for name, shape in shapes.items()}


def _spec_of(name: str, x) -> P:
    if name in _ROUTED:
        return P(None, EXPERT, DATA)
    return P(None, BOTH) if name.startswith("shared") else P()


def step_of(
    layers: int, mesh, batch: int, tokens: int, write: Callable = lambda layer: layer
) -> Made:
    """A train step on the layers' own inputs: the mean square of their output.

    Args:
      mesh: with the axes "data" and "expert".
      batch: examples of each device.
      write: what is made of the function of a layer, as `jax.checkpoint` does.
    """
    mixer = functools.partial(ragged_shards, gated_mlp, choices=CHOICES)
    mixer = mapped(mesh, mixer, BOTH, EXPERT, _ROUTED)
    one = write(functools.partial(layer, mixer, pin(mesh, BOTH)))

    def loss(params, x):
        x, more = jax.lax.scan(one, x, params)
        return jnp.square(x.astype(F32)).mean() + BALANCE * more.mean()

    params, tx = parameters(layers), optax.adamw(1e-5)
    state = placed(mesh, (params, jax.eval_shape(tx.init, params)), _spec_of)
    x = SDS((batch * mesh.size, tokens, WIDTH), BF16)
    return Made(
        train_step(loss, tx), (state, placed(mesh, x, lambda *_: P(BOTH))), (0,)
    )
