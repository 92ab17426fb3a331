"""A graph network: messages along edges, summed at their receivers by a scatter.

After Gilmer et al. 2017. The edges come with the batch, in no order.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size, training_step


class Size(NamedTuple):
    nodes: int
    edges: int
    width: int
    rounds: int


def initial(key, width: int, rounds: int, classes: int = 7):
    keys = jax.random.split(key, 5 * rounds).reshape(rounds, 5)
    layers = [
        {
            "pair": dense(k[0], 2 * width, width),
            "message": dense(k[1], width, width),
            "gate": dense(k[2], width, 1),
            "node": dense(k[3], 2 * width, width),
            "bias": jnp.zeros(width),
        }
        for k in keys
    ]
    return {"layers": layers, "head": dense(keys[0, 4], width, classes)}


def exchange(layer, x, senders, receivers):
    """Nodes [N, W] after one round of gated messages."""
    pairs = jnp.concatenate([x[senders], x[receivers]], axis=-1)
    messages = jax.nn.silu(pairs @ layer["pair"] + layer["bias"])
    messages = jax.nn.silu(messages @ layer["message"])
    messages = messages * jax.nn.sigmoid(messages @ layer["gate"])
    total = jax.ops.segment_sum(messages, receivers, x.shape[0])
    return x + jax.nn.silu(jnp.concatenate([x, total], axis=-1) @ layer["node"])


def loss(params, x, edges, labels, exchange=exchange):
    for layer in params["layers"]:
        x = exchange(layer, x, *edges)
    logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make(size: str):
    s = of_size(size, small=Size(12, 40, 8, 2), big=Size(20_000, 400_000, 64, 4))
    tx = optax.adam(1e-3)

    def init(key):
        k = jax.random.split(key, 4)
        params = initial(k[0], s.width, s.rounds)
        x = jax.random.normal(k[1], (s.nodes, s.width))
        edges = jax.random.randint(k[2], (2, s.edges), 0, s.nodes)
        labels = jax.random.randint(k[3], (s.nodes,), 0, 7)
        return (params, tx.init(params)), x, edges, labels

    return training_step(loss, tx), arguments(size, init), (0,)
