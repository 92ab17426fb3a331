"""Attention against `jax.nn`, its bytes, its masks, and its errors."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ops.attention import blockwise
from jaxmem.ops.attention.dot_product import dot_product_attention
from tests.arrays import array
from tests.ops.attention.attention_references import (
    KEY,
    RATE,
    lean_attention,
    plain_attention,
)
from tests.references import kept_bytes
from tests.sets import some_fast


def normal(*shape, seed=0, dtype=jnp.float32):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(b=2, t=13, s=9, n=4, k=2, h=5, dtype=jnp.float32):
    sizes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    return tuple(normal(*x, seed=i, dtype=dtype) for i, x in enumerate(sizes))


def mesh_of_8(kind=AxisType.Auto):
    return jax.make_mesh((8,), ("x",), axis_types=(kind,))


def value_and_grads(fn, args, g):
    out, pull = jax.vjp(jax.jit(fn), *args)
    return out, *pull(g.astype(out.dtype))


def assert_same(ours, theirs, atol=5e-6):
    """5e-6: sums of at most 50 float32 products of size 1, in another order."""
    for a, b in zip(ours, theirs, strict=True):
        assert not np.isnan(np.asarray(a)).any()
        np.testing.assert_allclose(np.asarray(a), np.asarray(b), atol=atol, rtol=2e-5)


def check_against_jax_nn(args, block_size, **kw):
    g = normal(*args[0].shape, seed=9)
    with jax.numpy_rank_promotion("allow"):
        want = value_and_grads(
            functools.partial(jax.nn.dot_product_attention, **kw), args, g
        )
    ours = functools.partial(dot_product_attention, block_size=block_size, **kw)
    assert_same(value_and_grads(ours, args, g), want)


LENGTHS = jnp.asarray([0, 6], jnp.int32)
OPTIONS = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": 2},
    "window of two sides": {"local_window_size": (1, 3)},
    "causal window": {"is_causal": True, "local_window_size": (3, 1)},
    "lengths": {"query_seq_lengths": LENGTHS, "key_value_seq_lengths": LENGTHS[::-1]},
    "scale": {"scale": 0.7},
}


@pytest.mark.fast(
    "plain-5",
    "window of two sides-5",
    "causal window-5",
    "lengths-5",
    "scale-5",
)
@pytest.mark.parametrize("block_size", some_fast([5, None], 5))
@pytest.mark.parametrize("option", OPTIONS)
def test_equals_jax_nn(option, block_size):
    check_against_jax_nn(qkv(), block_size, **OPTIONS[option])


@pytest.mark.fast(
    "1500-bias-shape0",
    "1500-bias-shape3",
    "1500-mask-shape2",
    "1500-mask-shape5",
)
@pytest.mark.parametrize(
    "shape",
    [
        (2, 4, 13, 9),
        pytest.param((1, 4, 13, 9), marks=pytest.mark.slow),
        (2, 1, 1, 9),
        (2, 1, 13, 1),
        pytest.param((1, 1, 1, 1), marks=pytest.mark.slow),
        (4, 1, 9),
    ],
)
@pytest.mark.parametrize("what", ["bias", "mask"])
@pytest.mark.parametrize("budget", [pytest.param(2**24, marks=pytest.mark.slow), 1500])
def test_broadcast_bias_and_mask(what, shape, budget, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_LOGITS_BYTES", budget)
    if what == "mask":
        mask = normal(*shape, seed=3) < 0  # leaves rows with nothing to see
        check_against_jax_nn(qkv(), None, mask=mask)
    else:
        check_against_jax_nn((*qkv(), normal(*shape, seed=3)), None)


@pytest.mark.fast("1500")
@pytest.mark.parametrize("budget", [2**24, 1500])
def test_segments_are_a_mask(budget, monkeypatch):
    """Rows of the last segment have no key to see."""
    monkeypatch.setattr(blockwise, "BLOCK_LOGITS_BYTES", budget)
    ours = jnp.asarray([[0] * 6 + [1] * 5 + [9] * 2, [3] * 13])
    theirs = jnp.asarray([[0] * 5 + [1] * 4, [0] * 4 + [3] * 5])
    mask = (ours[:, :, None] == theirs[:, None, :])[:, None]
    ids = {"query_segment_ids": ours, "key_value_segment_ids": theirs}
    args, g = qkv(), normal(2, 13, 4, 5, seed=9)
    assert_same(
        value_and_grads(functools.partial(dot_product_attention, **ids), args, g),
        value_and_grads(functools.partial(dot_product_attention, mask=mask), args, g),
    )
    single = {name: x[0] for name, x in ids.items()}
    out = dot_product_attention(*(x[0] for x in args), **single)
    whole = dot_product_attention(*args, **ids)
    np.testing.assert_allclose(np.asarray(out), np.asarray(whole[0]), atol=1e-6)


@pytest.mark.fast("bfloat16", "float32")
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32])
def test_rows_masked_by_a_huge_bias(dtype):
    """Where log-sum-exp would lose the logarithm of the number of keys."""
    args = (*qkv(), jnp.full((2, 1, 1, 9), -1e9))
    check_against_jax_nn(args, 5)
    out = dot_product_attention(*qkv(dtype=dtype), args[3])
    assert out.dtype == dtype


def test_no_key_to_see_gives_the_mean_value():
    q, k, v = qkv()
    out = dot_product_attention(q, k, v, mask=jnp.zeros((1, 1, 1, 1), bool))
    mean = jnp.repeat(v.mean(axis=1, keepdims=True), 2, axis=2)
    np.testing.assert_allclose(
        np.asarray(out), np.asarray(jnp.broadcast_to(mean, out.shape)), atol=1e-6
    )


def test_without_a_batch_axis():
    args = qkv()
    whole = dot_product_attention(*args, is_causal=True)
    single = dot_product_attention(*(x[1] for x in args), is_causal=True)
    np.testing.assert_allclose(np.asarray(single), np.asarray(whole[1]), atol=1e-6)


@pytest.mark.parametrize("shape", [(1, 1, 1, 1, 1, 1), (3, 17, 1, 3, 3, 2)])
def test_odd_sizes(shape):
    check_against_jax_nn(qkv(*shape), 4)


def test_no_batch_and_no_queries():
    for b, t in ((0, 3), (2, 0)):
        args = qkv(b=b, t=t)
        out = value_and_grads(dot_product_attention, args, args[0])
        assert [x.shape for x in out[1:]] == [x.shape for x in args]


# -- dropout


BLOCKS = [{}, {"block_size": 4}, {"block_size": 5}]


@pytest.mark.parametrize("shared", some_fast([False, True], False))
@pytest.mark.parametrize("budget", some_fast([1500, 2**24], 1500))
def test_dropout_mask_does_not_depend_on_blocks(shared, budget, monkeypatch):
    monkeypatch.setattr(blockwise, "BLOCK_LOGITS_BYTES", budget)
    args, g = qkv(b=6), normal(6, 13, 4, 5)
    kw = {"rate": RATE, "broadcast_dropout": shared}
    want = value_and_grads(functools.partial(plain_attention, **kw), args, g)
    for block in BLOCKS:
        lean = functools.partial(lean_attention, **kw, **block)
        assert_same(value_and_grads(lean, args, g), want)


def test_dropout_drops_at_the_rate():
    """With v the identity the output is the matrix of probabilities."""
    q, k, _ = qkv(b=4, t=64, s=64, n=4, k=4, h=64)
    v = jnp.broadcast_to(jnp.eye(64)[None, :, None, :], k.shape)
    out = np.asarray(dot_product_attention(q, k, v, dropout_rate=0.1, dropout_rng=KEY))
    n = out.size
    assert abs((out == 0).mean() - 0.1) < 5 * np.sqrt(0.1 * 0.9 / n)


def test_ends_of_the_rate():
    args = qkv()
    plain = np.asarray(dot_product_attention(*args))
    off = dot_product_attention(*args, dropout_rate=0.5, deterministic=True)
    np.testing.assert_array_equal(np.asarray(off), plain)
    assert not np.asarray(dot_product_attention(*args, dropout_rate=1.0)).any()


# -- transformations


def attend(q, k, v, key=KEY, block_size=5):
    return dot_product_attention(
        q, k, v, is_causal=True, dropout_rate=RATE, dropout_rng=key,
        block_size=block_size,
    )  # fmt: skip


@pytest.mark.fast("spec0", "spec1")
@pytest.mark.parametrize("spec", [("x",), (None, None, "x"), (None, "x")])
def test_sharded_jit(spec):
    """Batch or heads: the same values, without communication."""
    args = qkv(b=16, t=16, s=16, n=8, k=8, h=4)
    g = normal(*args[0].shape, seed=4)
    mesh = mesh_of_8()
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    want = value_and_grads(attend, args, g)
    sharded = [jax.device_put(x, sharding) for x in (*args, g)]
    step = jax.jit(lambda q, k, v, g: value_and_grads(attend, (q, k, v), g))
    assert_same(step(*sharded), want)
    text = step.lower(*sharded).compile().as_text()
    moved = re.findall(r"= \w+\[[^ ]+ (all-\w+|collective-\w+)\(", text)
    assert spec == (None, "x") or not moved, moved


@pytest.mark.parametrize("spec", [("x",), (None, None, "x")])
def test_shardings_that_are_part_of_types(spec):
    """Without dropout other kernels may be taken, for which types are plain."""
    args = qkv(b=16, t=16, s=16, n=8, k=8, h=4, dtype=jnp.bfloat16)
    g = normal(*args[0].shape, seed=4, dtype=jnp.bfloat16)
    attend = functools.partial(dot_product_attention, is_causal=True)
    want = value_and_grads(attend, args, g)
    mesh = mesh_of_8(AxisType.Explicit)
    sharding = NamedSharding(mesh, PartitionSpec(*spec))
    sharded = [jax.device_put(x, sharding) for x in (*args, g)]
    with jax.set_mesh(mesh):
        got = jax.jit(lambda q, k, v, g: value_and_grads(attend, (q, k, v), g))(
            *sharded
        )
        assert got[0].sharding.is_equivalent_to(sharding, 4)
    # numbers of at most 8, rounded to bfloat16 once in each
    assert_same(got, want, atol=2**-5)


@pytest.mark.fast("0")
@pytest.mark.parametrize("axis", [0, 2])
def test_shard_map(axis):
    args = qkv(b=8, t=13, s=9, n=8, k=8, h=4)
    g = normal(*args[0].shape, seed=4)
    mesh = mesh_of_8()
    spec = PartitionSpec(*([None] * axis), "x")

    def fn(q, k, v):
        return lean_attention(q, k, v, block_size=5)

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
    assert_same(value_and_grads(mapped, args, g), value_and_grads(fn, args, g))


def test_shard_map_over_queries_with_shared_keys():
    """The gradient of the replicated keys is summed over the shards."""
    args = qkv(t=16)
    g = normal(*args[0].shape, seed=4)
    mesh = mesh_of_8()
    cut, whole = PartitionSpec(None, "x"), PartitionSpec()

    def fn(q, k, v):
        return dot_product_attention(q, k, v, block_size=1)

    mapped = jax.shard_map(fn, mesh=mesh, in_specs=(cut, whole, whole), out_specs=cut)
    assert_same(value_and_grads(mapped, args, g), value_and_grads(fn, args, g))


def test_mask_is_the_same_under_transformations():
    args, g = qkv(), normal(2, 13, 4, 5)
    want = value_and_grads(attend, args, g)

    def scanned(q, k, v):
        keys = jnp.stack([KEY])
        return jax.lax.scan(lambda c, key: (c, attend(q, k, v, key)), 0, keys)[1][0]

    for fn in (jax.checkpoint(attend), scanned, jax.checkpoint(scanned)):
        assert_same(value_and_grads(fn, args, g), want)


def test_second_derivative():
    args = qkv(b=1, t=5, s=4, n=1, k=1, h=3)

    def slope(fn):
        def inner(q):
            return (jax.grad(lambda q: (fn(q, *args[1:]) ** 2).sum())(q) ** 2).sum()

        return np.asarray(jax.jit(jax.grad(inner))(args[0]))

    lean = functools.partial(lean_attention, rate=RATE, block_size=2)
    plain = functools.partial(plain_attention, rate=RATE)
    np.testing.assert_allclose(slope(lean), slope(plain), rtol=1e-4, atol=1e-5)


# -- what is kept and what exists


def test_keeps_a_key_for_dropout():
    args = qkv(b=2, t=8, s=8, n=2, k=2, h=4)

    def fn(q, k, v, key):
        return dot_product_attention(q, k, v, dropout_rate=0.1, dropout_rng=key)

    with_key = kept_bytes(fn, (*args, KEY), {0, 1, 2})
    without = kept_bytes(dot_product_attention, args, {0, 1, 2})
    assert with_key - without == 8


def _largest(jaxpr) -> int:
    """Elements of the largest value, inside loops too."""
    return max(v.aval.size for e in _jaxpr.walk(jaxpr) for v in e.outvars)


def _dot_flops(jaxpr, times=1) -> int:
    total = 0
    for e in _jaxpr.split(jaxpr)[0].eqns:
        if e.primitive.name == "dot_general":
            (contract, _), _ = e.params["dimension_numbers"]
            depth = np.prod([e.invars[0].aval.shape[i] for i in contract])
            total += 2 * times * e.outvars[0].aval.size * int(depth)
        trips = e.params["length"] if e.primitive.name == "scan" else 1
        total += sum(_dot_flops(j, times * trips) for j in _jaxpr.bodies(e))
    return total


def _layers(attention, args, keys):
    """Gradient of a scan over layers: the place where masks are hoisted and stacked."""

    def loss(x):
        body = lambda x, key: (attention(x, x, x, key).astype(x.dtype), None)
        return (jax.lax.scan(body, x, keys)[0] ** 2).sum()

    return jax.make_jaxpr(jax.grad(loss))(args)


@pytest.mark.parametrize("rate", [0.0, 0.1])
def test_nothing_quadratic_exists(rate):
    length = 1024
    x = jax.ShapeDtypeStruct((1, length, 2, 4), jnp.float32)

    def attention(q, k, v, key):
        dropped = dict(dropout_rate=rate, dropout_rng=key) if rate else {}
        return dot_product_attention(
            q, k, v, is_causal=True, block_size=64, local_window_size=200, **dropped
        )

    jaxpr = _layers(attention, x, jax.random.split(KEY, 3))
    assert _largest(jaxpr) < length * length / 4


def test_matmul_flops():
    x = jax.ShapeDtypeStruct((4, 512, 2, 8), jnp.float32)

    def flops(fn):
        step = jax.grad(lambda q, k, v: fn(q, k, v).sum(), argnums=(0, 1, 2))
        return _dot_flops(jax.make_jaxpr(step)(x, x, x))

    lean = functools.partial(dot_product_attention, block_size=64)
    assert flops(lean) <= 1.2 * flops(jax.nn.dot_product_attention)


# -- errors


Q, K, V = qkv()
IDS = "query_segment_ids", "key_value_segment_ids"


@pytest.mark.usefixtures("untyped")
@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ((Q, K, V[:, :5]), {}, "one shape"),
        ((Q, K[:1], V[:1]), {}, "batch and head dimension"),
        ((Q[:, :, :3], K, V), {}, "must divide"),
        ((Q, K[:, :0], V[:, :0]), {}, "at least one key"),
        ((Q[0, 0], K[0, 0], V[0, 0]), {}, "TNH"),
        ((Q.astype(jnp.bfloat16), K, V), {}, "one floating dtype"),
        ((Q, K, V, jnp.zeros((3, 1, 1, 9))), {}, "bias=.*a shape that broadcasts"),
        ((Q, K, V, None, jnp.zeros((1, 1, 13, 9))), {}, "mask=.*boolean"),
        ((Q, K, V), {"dropout_rate": 0.1}, "needs a random key"),
        ((Q, K, V), {"dropout_rate": 1.1}, "dropout_rate=1.1: .*at most 1"),
        ((Q, K, V), {"local_window_size": -1}, "local_window_size"),
        ((Q, K, V), {"query_seq_lengths": jnp.ones((3,), jnp.int32)}, "seq_lengths"),
        ((Q, K, V), {"implementation": "triton"}, "allowed are .* 'cudnn' and"),
        ((Q, K, V), {"implementation": "pallas"}, "no kernel for the platform"),
        ((Q, K, V), {"query_segment_ids": jnp.ones((2, 13), int)}, "or of neither"),
        (
            (Q, K, V),
            dict.fromkeys(IDS, jnp.ones((2, 13), int)),
            "segment_ids=.*integers",
        ),
        ((Q, K, V), {"block_size": 0}, "block_size"),
    ],
)
def test_bad_input(args, kwargs, text):
    with pytest.raises(ValueError, match=text):
        dot_product_attention(*args, **kwargs)
