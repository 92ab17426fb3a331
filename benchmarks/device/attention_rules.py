"""Attention by every rule that the kernels have, as cases of `right`."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.steps.kernels import Case, nbytes
from jaxmem import ops

SDS = jax.ShapeDtypeStruct


def _dropout(t: int, s: int) -> dict[str, Any]:
    return {"dropout_rate": 0.3, "dropout_rng": jax.random.key(23)}


def _lengths(t: int, s: int) -> dict[str, Any]:
    """The last example has few keys, the first all of them."""
    return {
        "query_seq_lengths": jnp.asarray([t, t // 3], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([s, s // 5 + 1], jnp.int32),
    }


def _segments(t: int, s: int) -> dict[str, Any]:
    ids = lambda n: jnp.broadcast_to(jnp.arange(n, dtype=jnp.int32) // 50, (2, n))
    return {"query_segment_ids": ids(t), "key_value_segment_ids": ids(s)}


def _window(t: int, s: int) -> dict[str, Any]:
    return {"local_window_size": (100, 3)}


def _causal(t: int, s: int) -> dict[str, Any]:
    return {"is_causal": True}


def _bias(t: int, s: int) -> dict[str, Any]:
    """Relative positions, which are trained."""
    return {"bias": SDS((1, 2, t, s), jnp.float32)}


def _key_bias(t: int, s: int) -> dict[str, Any]:
    return {"bias": SDS((2, 4, 1, s), jnp.float32)}


def _mask(t: int, s: int) -> dict[str, Any]:
    return {"mask": jax.random.bernoulli(jax.random.key(7), 0.8, (2, 1, 1, s))}


def _all_of(*rules: Callable) -> Callable:
    def both(t: int, s: int) -> dict[str, Any]:
        return {name: x for rule in rules for name, x in rule(t, s).items()}

    return both


# (queries, keys, heads, heads of keys); a block is of 64 or more. Programs of SHORT
# have one warpgroup, those of MANY take several blocks.
RAGGED, EVEN, GROUPED = (1000, 520, 2, 2), (1024, 1024, 2, 2), (512, 512, 4, 1)
SHORT, MANY = (392, 264, 2, 1), (1024, 1024, 32, 32)
SMALL = dict.fromkeys((RAGGED, EVEN), (128, 128, 2, 2))
SMALL |= {GROUPED: (128, 128, 4, 1), SHORT: (128, 128, 2, 1), MANY: (512, 512, 1, 1)}
RULES = {
    "even": (_all_of(), EVEN),
    "ragged": (_all_of(), RAGGED),
    "causal": (_causal, EVEN),
    "causal, ragged": (_causal, RAGGED),
    "dropout": (_dropout, RAGGED),
    "window": (_window, EVEN),
    "lengths": (_lengths, RAGGED),
    "segments": (_segments, EVEN),
    "bias": (_bias, EVEN),
    "bias of keys": (_key_bias, GROUPED),
    "mask": (_mask, EVEN),
    "shared keys": (_all_of(), GROUPED),
    "short": (_all_of(), SHORT),
    "short, causal, dropout": (_all_of(_causal, _dropout), SHORT),
    "short, lengths, window": (_all_of(_lengths, _window), SHORT),
    "many blocks": (_all_of(), MANY),
    "many blocks, dropout": (_all_of(_dropout), MANY),
    "all at once": (_all_of(_causal, _segments, _window, _dropout), GROUPED),
}


def case(name: str, small: bool, dtype) -> Case:
    """Attention by a rule; a bias is an argument, and has a gradient."""
    rule, sizes = RULES[name]
    t, s, heads, kept = SMALL[sizes] if small else sizes
    q, k = SDS((2, t, heads, 64), dtype), SDS((2, s, kept, 64), dtype)
    options = rule(t, s)
    bias = [options.pop("bias")] if "bias" in options else []
    args = q, k, k, *bias
    attend = partial(ops.dot_product_attention, **options)
    fn = lambda implementation: partial(attend, implementation=implementation)
    moved = 6 * nbytes(q, k) + 4 * nbytes(bias)  # a bias is read three times
    return Case("attention", fn, args, tuple(range(len(args))), moved)
