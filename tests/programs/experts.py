"""A mixture of experts: each token goes to two of them, as many as have room.

After Lepikhin et al. 2020: tables of zeros and ones send the tokens and fetch what
became of them; a second loss spreads them evenly. Adafactor.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

from tests.programs._common import arguments, dense, of_size, training_step


class Size(NamedTuple):
    groups: int
    tokens: int  # of a group
    width: int
    experts: int
    layers: int


def sent(probabilities, room: int):
    """Weights [T, E, C]: which tokens are at which place of which expert.

    Tokens in order, all first choices before all second ones.
    """
    weights, choices = jax.lax.top_k(probabilities, 2)
    weights = weights / weights.sum(-1, keepdims=True)
    experts = probabilities.shape[-1]
    chosen = jax.nn.one_hot(choices.T.reshape(-1), experts)
    place = (jnp.cumsum(chosen, axis=0) - 1) * chosen
    has_room = chosen * (place < room)
    at = has_room[..., None] * jax.nn.one_hot(place.astype(int), room)
    at = at.reshape(2, -1, experts, room)
    return jnp.einsum("kt,ktec->tec", weights.T, at)


def layer(params, x):
    """Tokens [T, W] after the experts, and the loss of an uneven spread."""
    experts = params["router"].shape[-1]
    probabilities = jax.nn.softmax(x @ params["router"], axis=-1)
    combine = sent(probabilities, 2 * len(x) // experts)
    dispatch = (combine > 0).astype(x.dtype)
    given = jnp.einsum("tec,tw->ecw", dispatch, x)
    hidden = jax.nn.gelu(jnp.einsum("ecw,ewh->ech", given, params["up"]))
    done = jnp.einsum("ech,ehw->ecw", hidden, params["down"])
    share = jnp.mean(dispatch.sum(-1), axis=0)
    uneven = experts * jnp.sum(share * probabilities.mean(0))
    return x + jnp.einsum("tec,ecw->tw", combine, done), uneven


def loss(params, x, y):
    def body(x, params):
        return jax.vmap(layer, in_axes=(None, 0))(params, x)

    x, uneven = jax.lax.scan(body, x, params)
    return jnp.mean((x - y) ** 2) + 1e-2 * uneven.mean()


def make(size: str):
    s = of_size(size, small=Size(2, 8, 6, 4, 2), big=Size(8, 512, 512, 8, 4))
    tx = optax.adafactor(1e-3)

    def init(key):
        k = jax.random.split(key, 5)
        of_experts = (s.layers, s.experts)
        params = {
            "router": dense(k[0], s.layers, s.width, s.experts),
            "up": dense(k[1], *of_experts, s.width, 4 * s.width),
            "down": dense(k[2], *of_experts, 4 * s.width, s.width),
        }
        x, y = jax.random.normal(k[3], (2, s.groups, s.tokens, s.width))
        return (params, tx.init(params)), x, y

    return training_step(loss, tx), arguments(size, init), (0,)
