"""Loops over a vocabulary that is sharded over devices: each has blocks of its words.

A block has as many words of every shard. The loop runs under a `vmap` over the shards,
so that sums over the words stay apart for each of them until it is done: else the
devices would add them up in every iteration.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.scheduling.tiling.shard_sums import combined
from jaxmem.scheduling.tiling.vocabulary_plan import VocabularyLoops

# (sums, arrays that are written block by block)
Carry = tuple[list[Any], list[Any]]


class VocabularyShards:
    """How the arrays of loops are seen by each shard of the vocabulary."""

    def __init__(self, plan: VocabularyLoops):
        self.count, self.words, self.names = plan.shards, plan.words, plan.names
        self.axis = plan.found.axis

    def split(self, x, axis: int):
        """An array with an axis for the shards before that of the words."""
        return x.reshape(*x.shape[:axis], self.count, self.words, *x.shape[axis + 1 :])

    def first(self, carry: Carry, written: Sequence[Any]) -> Carry:
        """What each shard starts from; `written`: the variables of arrays."""
        if self.count == 1:
            return carry
        sums, arrays = carry
        each = lambda x: jnp.broadcast_to(x, (self.count, *x.shape))
        pairs = zip(arrays, written, strict=True)
        return jax.tree.map(each, sums), [self.split(x, self.axis[v]) for x, v in pairs]

    def each(
        self, step: Callable, written: Sequence[Any], arrays: Mapping[Any, Any]
    ) -> Callable[[Carry], Carry]:
        """One iteration, for each shard.

        Args:
          step: gives the carry from the first word of the shard, its carry, and its
            part of `arrays`.
          written: variables of the arrays in the carry.
          arrays: those that are cut, by variable.
        """
        first = jnp.arange(self.count, dtype=jnp.int32) * self.words
        if self.count == 1:
            return lambda carry: step(first[0], carry, arrays)
        own = [self.split(x, self.axis[v]) for v, x in arrays.items()]
        of = lambda xs: dict(zip(arrays, xs, strict=True))
        carries = 0, [self.axis[v] for v in written]
        run = jax.vmap(
            lambda first, carry, xs: step(first, carry, of(xs)),
            in_axes=(0, carries, [self.axis[v] for v in arrays]),
            out_axes=carries,
            spmd_axis_name=self.names,
        )
        return lambda carry: run(first, carry, own)


def combined_sum(combine: str, total, dtype):
    """What the shards have added up, as one; sent in the type `dtype`."""
    if combine == "argmax":
        most, where = total
        first = jnp.argmax(most, 0, keepdims=True)  # shards are in the order of words
        take = lambda x: jnp.take_along_axis(x, first, 0)[0]
        return take(most), take(where)
    if combine == "take":  # one shard has the word, the others have zeros
        return combined("add", total)
    return combined(combine, total.astype(dtype)).astype(total.dtype)


def rescaled_sum(total, base, whole_base):
    """Sums of exp(x - base), each of a shard and with a base of its own, as one."""
    factor = jnp.exp((base - whole_base[None]).astype(total.dtype))
    factor = factor.reshape(total.shape)
    # a factor of what nothing has been added to may be infinite
    return combined("add", jnp.where(total == 0, total, total * factor))
