"""Attention by a kernel under a sharded `jit`: each device does its own part.

A reference stands in for the kernel, and XLA partitions it for the devices of the CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem.ops.attention.mapped import joins_batch
from jaxmem.ops.attention.partitioned import in_parts
from tests.arrays import array

B, T, S, H = 8, 8, 6, 4
# float32 sums of at most 8 terms, in two orders
RTOL = 8 * float(jnp.finfo(jnp.float32).eps)
P = PartitionSpec


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh(
        (4, 2), ("d", "h"), axis_types=(jax.sharding.AxisType.Auto,) * 2
    )


def forward(arrays):
    q, k, v = (arrays[name] for name in "qkv")
    k, v = (jnp.repeat(x, q.shape[2] // k.shape[2], 2) for x in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    if arrays["kv_len"] is not None:
        seen = jnp.arange(S)[None, None, None] < arrays["kv_len"][:, None, None, None]
        logits = jnp.where(seen, logits, -1e9)
    o = jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits), v)
    return o, jax.nn.logsumexp(logits, -1)


def backward(arrays):
    own = lambda *qkv: forward(arrays | dict(zip("qkv", qkv, strict=True)))[0]
    pull = jax.vjp(own, *(arrays[name] for name in "qkv"))[1]
    return dict(zip("qkv", pull(arrays["g"]), strict=True))


PASSES = {
    "forward": (forward, ("q", "total")),
    "backward": (backward, ("k", "q", "v")),
}


def normal(shape, seed):
    return array(np.random.default_rng(seed).normal(size=shape), np.float32)


def inputs(heads, of_keys, lengths=True):
    shapes = {"q": (B, T, heads, H), "k": (B, S, of_keys, H), "v": (B, S, of_keys, H)}
    made = {name: normal(shape, i) for i, (name, shape) in enumerate(shapes.items())}
    o, total = forward(made | {"kv_len": None})
    made |= {"o": o, "total": total, "g": normal(o.shape, 7)}
    made["kv_len"] = jnp.arange(1, B + 1) % S + 1 if lengths else None
    return made


def placed(mesh, spec, arrays):
    def place(x):
        sizes = [
            np.prod([mesh.shape[a] for a in axes or ()], dtype=int) for axes in spec
        ]
        fits = len(sizes) <= x.ndim and all(
            n % size == 0 for n, size in zip(x.shape, sizes, strict=False)
        )
        return jax.device_put(x, NamedSharding(mesh, spec if fits else P()))

    # the statistics have their axes in another order
    same = {n: x for n, x in arrays.items() if x is not None and x.ndim == 4}
    return arrays | {name: place(x) for name, x in same.items()}


@pytest.mark.parametrize("which", PASSES)
@pytest.mark.parametrize("heads", [(4, 4), (8, 2), (4, 1), (3, 3)], ids=str)
@pytest.mark.parametrize(
    "spec",
    [
        *(P(("d",)), P(("d",), None, ("h",)), P(("d", "h")), P(None, None, ("h",))),
        *(P(None, ("d",)), P()),
    ],
    ids=str,
)
def test_each_device_does_its_part(mesh, spec, heads, which):
    run, results = PASSES[which]
    arrays = inputs(*heads)
    got = jax.jit(in_parts(run, results))(placed(mesh, spec, arrays))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(run(arrays)), strict=True):
        scale = float(jnp.abs(b).max())
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * scale)


def test_nothing_is_sent_for_a_sharded_batch_and_sharded_heads(mesh):
    arrays = placed(mesh, P(("d",), None, ("h",)), inputs(8, 2, lengths=False))
    arrays["total"] = jax.device_put(
        arrays["total"], NamedSharding(mesh, P("d", "h", None))
    )
    for run, results in PASSES.values():
        text = jax.jit(in_parts(run, results)).lower(arrays).compile().as_text()
        assert not any(f"{kind}(" in text for kind in ("all-gather", "all-reduce"))


@pytest.mark.parametrize("within", [False, True])
def test_a_mapped_axis_joins_the_batch(mesh, within):
    arrays = inputs(4, 4)
    three = jax.tree.map(lambda x: jnp.stack([x, 2 * x, 3 * x]), arrays)
    three["kv_len"] = arrays["kv_len"]  # the same for all
    axes = {name: 0 for name in three} | {"kv_len": None}
    joined = joins_batch(in_parts(forward, ("q", "total")), within)
    got = jax.jit(jax.vmap(joined, in_axes=(axes,)))(three)
    want = jax.vmap(forward, in_axes=(axes,))(three)
    for a, b in zip(got, want, strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=RTOL * float(jnp.abs(b).max()))


def test_a_rule_without_a_mesh_does_it_whole():
    arrays = inputs(4, 4)
    got = jax.jit(in_parts(forward, ("q", "total")))(arrays)
    np.testing.assert_array_equal(got[0], jax.jit(forward)(arrays)[0])
