"""The records of lookups, whose plain forms keep the ids too: there is no formula."""

import jax
import jax.numpy as jnp

from jaxmem.ops.embedding.bag import embedding_bag
from jaxmem.ops.embedding.embed import embed
from jaxmem.ops.embedding.product_keys import product_key_memory
from jaxmem.ops.record import OpRecord


def _looked_up(table, ids):
    return jnp.take(table, ids, axis=0)


def _summed(table, ids):
    return jnp.sum(jnp.take(table, ids, axis=0), axis=ids.ndim - 1)


def _searched(queries, keys, values, k):
    """Every pair of keys is scored."""
    halves = queries.reshape(*queries.shape[:-1], 2, -1)
    first, second = jnp.moveaxis(jnp.einsum("...hpd,hpnd->...hpn", halves, keys), -2, 0)
    scores = (first[..., None] + second[..., None, :]).reshape(*first.shape[:-1], -1)
    best, ids = jax.lax.top_k(scores, k)
    weights = jax.nn.softmax(best, axis=-1)
    return jnp.einsum("...hk,...hkv->...v", weights, jnp.take(values, ids, axis=0))


EMBEDDINGS = (
    OpRecord(embed, reference=_looked_up),
    OpRecord(embedding_bag, reference=_summed),
    OpRecord(product_key_memory, reference=_searched),
)
