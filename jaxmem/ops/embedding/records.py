"""The records of lookups, whose plain forms keep the ids too: there is no formula."""

import jax.numpy as jnp

from jaxmem.ops.embedding.bag import embedding_bag
from jaxmem.ops.embedding.embed import embed
from jaxmem.ops.embedding.product_keys import product_key_memory
from jaxmem.ops.record import OpRecord


def _looked_up(table, ids):
    return jnp.take(table, ids, axis=0)


def _summed(table, ids):
    return jnp.sum(jnp.take(table, ids, axis=0), axis=ids.ndim - 1)


EMBEDDINGS = (
    OpRecord(embed, reference=_looked_up),
    OpRecord(embedding_bag, reference=_summed),
    OpRecord(product_key_memory),
)
