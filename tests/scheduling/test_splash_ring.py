"""The ring of splash attention that `benchmarks.published_rows` has: equal to plain."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks.models.splash_ring import CONTEXT, places, ring_attention
from benchmarks.steps.tiles import softmax_attention
from jaxmem.ops.attention import splash

DEVICES, TOKENS, HEADS, GROUPS, SIZE = 4, 1024, 2, 1, 128
# bfloat16's half of a last place, of the queries, the probabilities, their gradients
# and the results
ROUNDED = 4 * 2.0**-8


def plain(q, k, v):
    k, v = (jnp.repeat(x, HEADS // GROUPS, 2) for x in (k, v))
    return softmax_attention(q, k, v)


@pytest.mark.usefixtures("standard_jax")
def test_a_ring_is_plain_attention_in_another_order(monkeypatch):
    # by XLA's operations: the simulator's callbacks wait for each other in a ring
    monkeypatch.setattr(splash, "simulated_platform", lambda: "tpu")
    mesh = jax.make_mesh((DEVICES,), (CONTEXT,), (jax.sharding.AxisType.Auto,))
    spec = P(None, CONTEXT)
    ring = jax.shard_map(
        functools.partial(ring_attention, DEVICES),
        mesh=mesh,
        in_specs=(spec,) * 3,
        out_specs=spec,
        check_vma=False,
    )
    shapes = [(1, TOKENS, heads, SIZE) for heads in (HEADS, GROUPS, GROUPS, HEADS)]
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = [jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True)]
    q, k, v, g = (x.astype(jnp.bfloat16) for x in drawn)
    order = np.asarray(places(TOKENS, DEVICES)).astype(int)
    assert sorted(order) == list(range(TOKENS))

    def both(attention, *args):
        out, pull = jax.vjp(attention, *args[:3])
        return out, *pull(args[3])

    moved = [
        jax.device_put(x[:, order], NamedSharding(mesh, spec)) for x in (q, k, v, g)
    ]
    found = jax.jit(functools.partial(both, ring))(*moved)
    wide = [x.astype(jnp.float32) for x in (q, k, v, g)]
    for got, want in zip(found, both(plain, *wide), strict=True):
        got, want = np.asarray(got, np.float32), np.asarray(want)[:, order]
        np.testing.assert_allclose(got, want, atol=ROUNDED * np.abs(want).max(), rtol=0)
