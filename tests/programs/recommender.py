"""A recommender: large tables of users and items, of which a batch reads some rows.

Two towers and features crossed, trained with Adam whose moments have 8 bits.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxmem
from tests.programs._common import arguments, dense, of_size, training_step


class Size(NamedTuple):
    batch: int
    users: int
    items: int
    width: int
    history: int


def tower(params, x):
    return jax.nn.relu(x @ params["in"] + params["bias"]) @ params["out"]


def loss(params, users, items, history, clicked):
    """Of clicks on items, from users and the items that they clicked on before."""
    seen = params["items"][history]
    weights = jax.nn.softmax((seen * params["attend"]).sum(-1), axis=-1)
    user = params["users"][users] + (weights[..., None] * seen).sum(1)
    item = params["items"][items]
    both = jnp.concatenate([user, item, user * item], axis=-1)
    logits = tower(params["tower"], both)[:, 0]
    return optax.sigmoid_binary_cross_entropy(logits, clicked).mean()


def make(size: str):
    s = of_size(
        size,
        small=Size(4, 600, 11, 8, 3),
        big=Size(4096, 200_000, 50_000, 128, 50),
    )
    tx = jaxmem.adama(1e-3, bits=8)

    def init(key):
        k = jax.random.split(key, 9)
        params = {
            "users": 0.1 * jax.random.normal(k[0], (s.users, s.width)),
            "items": 0.1 * jax.random.normal(k[1], (s.items, s.width)),
            "attend": jax.random.normal(k[2], (s.width,)),
            "tower": {
                "in": dense(k[3], 3 * s.width, 4 * s.width),
                "bias": jnp.zeros(4 * s.width),
                "out": dense(k[4], 4 * s.width, 1),
            },
        }
        users = jax.random.randint(k[5], (s.batch,), 0, s.users)
        items = jax.random.randint(k[6], (s.batch,), 0, s.items)
        history = jax.random.randint(k[7], (s.batch, s.history), 0, s.items)
        clicked = jax.random.bernoulli(k[8], 0.3, (s.batch,)).astype(float)
        return (params, tx.init(params)), users, items, history, clicked

    return training_step(loss, tx), arguments(size, init), (0,)
