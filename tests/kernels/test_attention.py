"""Attention's kernels against the XLA path, and how the public op reaches them.

The TPU's kernels run in the simulator, in blocks of 128, on lengths that are no
multiple of it. The reference is `implementation="xla"`, which has tests of its own.
"""

import functools
import itertools
import math
import re
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.memory import target_mesh, targets
from jaxmem.ops.attention.dot_product import dot_product_attention
from pallas_kernels import simulated
from pallas_kernels.attention import inputs as common
from pallas_kernels.attention.tpu import blocks, grid
from tests.arrays import array
from tests.references import kept_bytes

AVAILABLE = {t.name for t in targets() if t.available}
needs = lambda chip: pytest.mark.skipif(chip not in AVAILABLE, reason="targets extra")
needs_tpu = needs("tpu-v5e")
KEY = jax.random.key(23)
DROPPED = {"dropout_rate": 0.3, "dropout_rng": KEY}
on_pallas = functools.partial(dot_product_attention, implementation="pallas")


def normal(*shape, seed=0, dtype=jnp.float32):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(b=1, t=200, s=150, n=2, k=2, h=64, dtype=jnp.float32):
    sizes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    return tuple(normal(*x, seed=i, dtype=dtype) for i, x in enumerate(sizes))


def of_some(fn, args, wanted):
    """`fn` of those arguments alone, and those arguments."""

    def partial(*some):
        full = list(args)
        for i, x in zip(wanted, some, strict=True):
            full[i] = x
        return fn(*full)

    return partial, tuple(args[i] for i in wanted)


def value_and_grads(fn, args, wanted=(0, 1, 2)):
    """Under one jit; the cotangent is normal."""

    def step(*args):
        partial, some = of_some(fn, args, wanted)
        out, pull = jax.vjp(partial, *some)
        return out, *pull(normal(*out.shape, seed=9).astype(out.dtype))

    return jax.block_until_ready(jax.jit(step)(*args))


def assert_close(got, want, atol=5e-6):
    """5e-6: sums of some 200 float32 products of size 1, in another order."""
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(x.astype(jnp.float32)) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=atol, rtol=2e-5)


def check(args, wanted=(0, 1, 2), atol=5e-6, platform="tpu", **kw):
    want = value_and_grads(functools.partial(dot_product_attention, **kw), args, wanted)
    with simulated(platform):
        got = value_and_grads(functools.partial(on_pallas, **kw), args, wanted)
    assert_close(got, want, atol)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCKS", (128,))


# -- values and gradients


def test_causal_with_dropout():
    check(qkv(), is_causal=True, **DROPPED)


@pytest.mark.slow
def test_lengths_and_rows_that_see_nothing():
    """Of no keys at all, and of none in the first sequence's window.

    A length beyond the array's is the array's.
    """
    lengths = {"query_seq_lengths": [130, 300], "key_value_seq_lengths": [90, 0]}
    arrays = {k: jnp.asarray(x, jnp.int32) for k, x in lengths.items()}
    check(qkv(b=2, n=1, k=1), local_window_size=(20, 40), **arrays, **DROPPED)


def test_dropout_bits_are_those_of_the_reference():
    """With v the identity the output is the probabilities: their zeros, to the bit."""
    q, k, _ = qkv(b=2, t=130, s=256, n=2, k=2, h=256)
    v = jnp.broadcast_to(jnp.eye(256)[None, :, None], k.shape)
    want = jax.jit(functools.partial(dot_product_attention, **DROPPED))(q, k, v)
    with simulated("tpu"):
        got = jax.jit(functools.partial(on_pallas, **DROPPED))(q, k, v)
    assert 0.28 < (np.asarray(want) == 0).mean() < 0.32
    np.testing.assert_array_equal(np.asarray(got) == 0, np.asarray(want) == 0)


IDS = {"q_segments": jnp.arange(400)[None] // 256}
IDS["kv_segments"] = jnp.arange(384)[None] // 256
LENGTHS = {"q_len": jnp.asarray([330]), "kv_len": jnp.asarray([290])}
WHOLE = [
    ({"is_causal": True}, {}),
    ({"local_window_size": (300, 200)}, {}),
    (
        {
            "query_seq_lengths": LENGTHS["q_len"],
            "key_value_seq_lengths": LENGTHS["kv_len"],
        },
        LENGTHS,
    ),
    (
        {
            "query_segment_ids": IDS["q_segments"],
            "key_value_segment_ids": IDS["kv_segments"],
        },
        IDS,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize("vmem", [blocks.LEAST_VMEM, 1])
@pytest.mark.parametrize("how, extras", WHOLE, ids=lambda x: next(iter(x), ""))
def test_blocks_wholly_and_partly_seen(how, extras, vmem, monkeypatch):
    """Some blocks take a mask, and others none, in one backward pass and in two."""
    monkeypatch.setattr(blocks, "LEAST_VMEM", vmem)
    check(qkv(t=400, s=384, n=1, k=1, h=128), **how, **DROPPED)


@pytest.mark.parametrize(
    "how, extras",
    [*WHOLE[:2], *(pytest.param(*x, marks=pytest.mark.slow) for x in WHOLE[2:])],
    ids=lambda x: next(iter(x), ""),
)
def test_which_blocks_take_no_mask(how, extras):
    """Those of which all queries are there, and see all keys."""
    q, k, v = qkv(t=400, s=384, n=1, k=1, h=128)
    is_causal, window = how.get("is_causal", False), how.get("local_window_size")
    rules = common.Rules(1.0, is_causal, window, 0.0, False)
    inputs = common.Inputs(q, k, v, extras=common.Extras(**extras))
    case = blocks.case_for(rules, inputs, {}, (None, None))
    scalars = blocks.scalars_for(case, inputs)
    t, s = np.arange(512)[:, None], np.arange(384)[None, :]
    seen = (t < extras.get("q_len", [400])[0]) & (s < extras.get("kv_len", [384])[0])
    near = common.near(rules, t, s)
    seen = seen if near is None else seen & near
    if extras is IDS:
        seen = seen & (t // 256 == s // 256)
    found = set()
    for i, j in itertools.product(range(4), range(3)):
        at = grid.GridPoint(0, 0, jnp.int32(i), 0, jnp.int32(j))
        whole = np.all(seen[128 * i : 128 * (i + 1), 128 * j : 128 * (j + 1)])
        ran = []
        with mock.patch.object(grid.pl, "when", lambda yes: lambda f: yes and f()):
            grid.for_visited(case, scalars, at, ran.append)
        assert ran == [True] if whole else ran in ([], [False])
        found.add(bool(whole))
    assert found == {True, False}


@pytest.mark.slow
def test_two_passes_shared_dropout_and_grouped_queries(monkeypatch):
    monkeypatch.setattr(blocks, "LEAST_VMEM", 1)
    dropped = DROPPED | {"broadcast_dropout": True}
    check(qkv(b=2, t=150, n=4, k=2), local_window_size=(20, 40), **dropped)


@pytest.mark.slow
def test_segments_and_grouped_queries():
    """Of the last segment's queries no key is to be seen."""
    ids = jnp.asarray(np.arange(200)[None] // 60, jnp.int32)
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids[:, :150] % 2}
    check(qkv(n=4, k=1), is_causal=True, **segments, **DROPPED)


@pytest.mark.slow
def test_blocks_that_segments_hide():
    """Sequences packed into one row, none of which begins a block."""
    ids = jnp.asarray([[0] * 100 + [1] * 100 + [2] * 140, [3] * 300 + [0] * 40])
    segments = {"query_segment_ids": ids, "key_value_segment_ids": ids}
    check(qkv(b=2, t=340, s=340, n=1, k=1), **segments)


@pytest.mark.parametrize(
    "starts", [[130], pytest.param([130, 0], marks=pytest.mark.slow)]
)
def test_mask_of_keys(starts):
    """Padding on the left, so that with a causal mask the first queries see nothing."""
    mask = jnp.arange(150)[None] >= jnp.asarray(starts)[:, None]
    args = qkv(b=len(starts), n=1, k=1)
    check(args, mask=mask[:, None, None], is_causal=True, **DROPPED)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 200, 150), (1, 1, 200, 1), (1, 2, 200, 150)])
def test_mask_of_queries_and_keys(shape):
    """Some rows see nothing; the bias is added to what is seen."""
    mask = (normal(*shape, seed=7) > 0).at[:, :, :9].set(False)
    args = *qkv(b=2), normal(1, 2, 1, 150, seed=5)
    check(args, mask=mask, local_window_size=(60, 9), **DROPPED)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 2, 200, 150), (1, 1, 1, 150), (1, 2, 200, 1)])
def test_bias(shape):
    """Of queries and keys, of keys, of queries; with rows of nothing but -1e9."""
    bias = jnp.where(normal(*shape, seed=5) < -1, -1e9, normal(*shape, seed=6))
    bias = bias.at[..., :7, :].set(-1e9) if shape[2] > 1 else bias
    check((*qkv(b=2), bias))


@pytest.mark.slow
def test_a_bias_that_hides_whole_blocks():
    bias = jnp.zeros((1, 1, 1, 150)).at[..., :128].set(-jnp.inf)
    check((*qkv(n=1, k=1), bias))


@pytest.mark.slow
def test_bfloat16_and_padded_heads():
    """1/32: probabilities are rounded (2**-9) before they are divided or after, and
    the gradients are sums of rounded products that reach 8."""
    args = qkv(n=3, k=3, h=40, dtype=jnp.bfloat16)
    check(args, atol=1 / 32, is_causal=True, **DROPPED)


@pytest.mark.slow
def test_the_op_reaches_the_gpu():
    """1/32 as above. What its kernel does is in test_attention_gpu.py."""
    args = qkv(t=128, s=128, dtype=jnp.bfloat16)
    check(args, atol=1 / 32, platform="cuda", is_causal=True, **DROPPED)


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,), (1, 2)])
def test_some_gradients(wanted):
    check(qkv(n=1, k=1), wanted=wanted, is_causal=True, **DROPPED)


@pytest.mark.slow
def test_under_vmap(monkeypatch):
    """The mapped axis has one dropout mask, as on the XLA path."""
    # the simulator cannot map a grid whose dimensions are said to be parallel
    monkeypatch.setattr(grid.pltpu, "CompilerParams", lambda **_: None)
    args = tuple(jnp.stack([x, -x]) for x in qkv(n=1, k=1, s=200))
    lengths = jnp.asarray([[200], [90]])

    def mapped(implementation):
        def attend(q, k, v, n):
            how = {"implementation": implementation, "is_causal": True, **DROPPED}
            return dot_product_attention(q, k, v, key_value_seq_lengths=n, **how)

        return jax.vmap(attend)

    with simulated("tpu"):
        got = value_and_grads(mapped("pallas"), (*args, lengths))
    assert_close(got, value_and_grads(mapped("xla"), (*args, lengths)))


@pytest.mark.slow
def test_saved_as_codes():
    """1/10: codes of 8 bits are off by up to 1/64, and are cut otherwise here."""
    check(qkv(n=1, k=1), save=8, is_causal=True, atol=0.1)


# -- which blocks are visited


RULES = [
    common.Rules(1.0, causal, window, 0.0, False)
    for causal, window in itertools.product(
        (False, True), (None, (0, 0), (3, 5), (10, 1))
    )
]


@pytest.mark.parametrize("rules", RULES, ids=lambda r: f"{r.causal}-{r.window}")
def test_rows_that_see_nothing_are_known(rules):
    t, s = np.arange(23)[:, None], np.arange(9)[None, :]
    for q_len, kv_len in ((None, None), (23, 4), (7, 9), (20, 0)):
        q, k = jnp.zeros((1, 23, 1, 1)), jnp.zeros((1, 9, 1, 1))
        seen = np.broadcast_to(True, (23, 9))
        for condition in (common.near(rules, t, s), kv_len and s < kv_len):
            seen = seen if condition is None else seen & condition
        real = np.arange(23) < (23 if q_len is None else q_len)
        lengths = {"q_len": q_len, "kv_len": kv_len}
        lengths = {
            k: None if x is None else jnp.full((1,), x) for k, x in lengths.items()
        }
        got = common.sees_nothing(
            rules, common.Inputs(q, k, extras=common.Extras(**lengths))
        )
        got = np.zeros(23, bool) if got is None else np.asarray(got)[0]
        np.testing.assert_array_equal(got, ~seen.any(axis=1) & real)
        for shape in ((1, 2, 23, 9), (1, 1, 1, 9), (1, 1, 23, 1)):
            mask = np.random.default_rng(0).random(shape) < 0.3
            extras = common.Extras(mask=jnp.asarray(mask), **lengths)
            inputs = common.Inputs(q, k, extras=extras)
            nothing = ~(seen & mask).any(axis=3).all(axis=(0, 1)) & real
            got = np.asarray(common.sees_nothing(rules, inputs))[0]
            np.testing.assert_array_equal(got, nothing)


@pytest.mark.parametrize("rules", RULES, ids=lambda r: f"{r.causal}-{r.window}")
def test_blocks_seen_are_the_same_from_both_sides(rules):
    """A block of keys is among those that a block of queries visits, iff vice versa."""
    t, s, size = 23, 40, 4
    near = common.near(rules, np.arange(t)[:, None], np.arange(s)[None, :])
    near = np.broadcast_to(True if near is None else near, (t, s))
    for i, j in itertools.product(range(0, t, size), range(0, s, size)):
        queries, keys = (i, min(i + size, t) - 1), (j, min(j + size, s) - 1)
        some = near[i : i + size, j : j + size].any()
        low, high = common.keys_seen(rules, *queries, s)
        assert (int(low) <= keys[1] and keys[0] <= int(high)) == some
        low, high = common.queries_seeing(rules, *keys, t)
        assert (int(low) <= queries[1] and queries[0] <= int(high)) == some
        whole = common.all_seen(rules, queries, keys)
        every = near[i : i + size, j : j + size].all()
        assert (whole is None or whole) == every


# -- what is kept, and what runs


def test_keeps_no_more_than_the_reference():
    """And less where v is kept: as the argument that it is, not in another order."""
    args = qkv(t=16, s=16)
    for wanted in ({0, 1, 2}, {0}, {1}, {2}, {0, 2}):
        ours, reference = (
            kept_bytes(functools.partial(fn, **DROPPED), args, wanted)
            for fn in (on_pallas, dot_product_attention)
        )
        assert ours == reference - (0 if wanted == {2} else args[2].nbytes)


def kernels_in(jaxpr) -> list[str]:
    """The names of the TPU's kernels that it calls."""
    eqns = (e for e in _jaxpr.walk(jaxpr) if e.primitive.name == "pallas_call")
    names = (str(e.params["name"]) for e in eqns)
    return [name for name in names if name.startswith("attention_")]


@pytest.mark.parametrize(
    "wanted, name",
    [((0,), "attention_dq"), ((2,), "attention_dkv"), ((0, 1), "attention_dkv")],
)
def test_only_what_is_wanted_runs(wanted, name):
    """dq comes with dk and dv where it has room on the chip."""
    fn, some = of_some(on_pallas, qkv(t=16, s=16), wanted)
    step = jax.grad(lambda *x: fn(*x).sum(), argnums=range(len(some)))
    assert kernels_in(jax.make_jaxpr(step)(*some)) == ["attention_forward", name]


@pytest.mark.slow
def test_checkpoint_keeps_what_its_policy_says():
    loss = lambda *args: on_pallas(*args, **DROPPED).sum()
    names = (f"jaxmem_attention_{n}" for n in ("output", "row_max", "row_log_sum"))
    policy = jax.checkpoint_policies.save_only_these_names(*names)

    def forward_kernels(fn):
        step = jax.make_jaxpr(jax.grad(fn, argnums=(0, 1, 2)))
        return kernels_in(step(*qkv(t=16, s=16))).count("attention_forward")

    assert forward_kernels(loss) == 1
    assert forward_kernels(jax.checkpoint(loss)) == 2
    assert forward_kernels(jax.checkpoint(loss, policy=policy)) == 1


def long_step(q, k, v, key):
    """Of queries, keys and values as a projection gives them, [b, t, n * h]."""

    def loss(*args):
        q, k, v = (x.reshape(*x.shape[:2], 16, 64) for x in args)
        o = on_pallas(q, k, v, dropout_rate=0.1, dropout_rng=key)
        return o.astype(jnp.float32).sum()

    return jax.value_and_grad(loss, argnums=(0, 1, 2))(q, k, v)


def long_args(length=8192):
    x = jax.ShapeDtypeStruct((1, length, 1024), jnp.bfloat16)
    return x, x, x, jax.eval_shape(lambda: jax.random.key(0))


@pytest.fixture
def usual_blocks(monkeypatch):
    monkeypatch.setattr(blocks, "BLOCKS", (512, 256, 128))


@pytest.mark.usefixtures("usual_blocks")
@pytest.mark.parametrize(
    "chip, platform, most",
    [
        pytest.param(
            "tpu-v5e", "tpu", 2**20, marks=(needs("tpu-v5e"), pytest.mark.slow)
        ),
        # the cotangent, as long as the output, and numbers for each row
        pytest.param(
            "h100", "cuda", 20 * 2**20, marks=(needs("h100"), pytest.mark.slow)
        ),
    ],
)
def test_nothing_quadratic_in_the_program(chip, platform, most):
    """8192 queries and keys: 64 Mi logits a head; an input has 8 Mi elements."""
    step = jax.jit(long_step)
    assert jaxmem.estimate(step, *long_args(), target=chip).temp_bytes < most
    text = export.export(step, platforms=[platform])(*long_args()).mlir_module()
    shapes = re.findall(r"tensor<((?:\d+x)+)", text)
    sizes = [math.prod(map(int, shape.split("x")[:-1])) for shape in shapes]
    assert max(sizes) == 8192 * 16 * 64


@pytest.mark.slow
@pytest.mark.usefixtures("usual_blocks")
@pytest.mark.parametrize(
    "chip, passes",
    [
        pytest.param("tpu-v4", 2, marks=needs("tpu-v4")),
        pytest.param("tpu-v5e", 1, marks=needs("tpu-v5e")),
    ],
)
def test_two_passes_compile_where_dq_has_no_room(chip, passes):
    """Of 16 MiB, but not of 128: 32 MiB of gradients are no temporaries."""
    step, args = jax.jit(long_step), long_args(16384)
    assert jaxmem.estimate(step, *args, target=chip).temp_bytes < 8 * 2**20
    with jax.sharding.use_abstract_mesh(target_mesh(chip, (1,), ("_",))):
        names = kernels_in(jax.make_jaxpr(long_step)(*args))
    assert len(names) == 1 + passes


MANY = {
    "query_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
    "key_value_seq_lengths": jax.ShapeDtypeStruct((2,), jnp.int32),
    "query_segment_ids": jax.ShapeDtypeStruct((2, 600), jnp.int32),
    "key_value_segment_ids": jax.ShapeDtypeStruct((2, 333), jnp.int32),
    "bias": jax.ShapeDtypeStruct((2, 4, 600, 333), jnp.float32),
    "mask": jax.ShapeDtypeStruct((2, 1, 1, 333), jnp.bool_),
}


@needs_tpu
@pytest.mark.slow
@pytest.mark.usefixtures("usual_blocks")
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "heads, head, dtype",
    [(4, 64, "bfloat16"), (2, 64, "float32"), (4, 256, "float32"), (1, 40, "float32")],
)
def test_everything_at_once_compiles(heads, head, dtype, x64):
    q = jax.ShapeDtypeStruct((2, 600, 4, head), dtype)
    k = jax.ShapeDtypeStruct((2, 333, heads, head), dtype)

    def loss(q, k, v, others):
        how = {"is_causal": True, "local_window_size": (100, 50)}
        return on_pallas(q, k, v, **others, **how, **DROPPED).astype("float32").sum()

    with jax.enable_x64(x64):
        step = jax.jit(jax.grad(loss, argnums=(0, 1, 2)))
        jaxmem.estimate(step, q, k, k, MANY, target="tpu-v5e")


@needs_tpu
@pytest.mark.slow
def test_shard_map_compiles_and_sharded_jit_says_so():
    mesh, spec = target_mesh("tpu-v5e", (4,), ("x",)), PartitionSpec("x")
    x = jax.ShapeDtypeStruct(
        (4, 256, 2, 64), jnp.float32, sharding=NamedSharding(mesh, spec)
    )
    attend = functools.partial(on_pallas, is_causal=True, **DROPPED)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=spec, out_specs=spec)
    step = lambda fn: jax.jit(jax.grad(lambda x: fn(x, x, x).sum()))
    jaxmem.estimate(step(mapped), x, target="tpu-v5e")
    with pytest.raises(NotImplementedError, match="shard_map"):
        jaxmem.estimate(step(attend), x, target="tpu-v5e")


# -- refusals


Q, K, V = qkv(t=16, s=16)


@pytest.mark.parametrize(
    ("args", "kwargs", "text"),
    [
        ([x.astype(jnp.float16) for x in (Q, K, V)], {}, "float32 and bfloat16, not"),
        ((Q, K, V), {"bias": jnp.ones((16, 16), jnp.float16)}, "a bias of float32"),
        (qkv(t=16, s=16, h=264), {}, "TPU: heads of up to 256, not 264"),
        ((Q, K, V), {"block_size": 100}, "TPU: block_q is a multiple of 128"),
        ((Q, K, V), {}, "no kernel for the platform that this is lowered for"),
    ],
)
def test_what_no_kernel_does_is_said(args, kwargs, text):
    with pytest.raises(ValueError, match=text):
        on_pallas(*args, **kwargs)


def test_second_derivative_is_refused():
    slope = lambda q: jax.grad(lambda q: (on_pallas(q, K, V) ** 2).sum())(q).sum()
    with pytest.raises(ValueError, match="a first derivative alone"):
        jax.make_jaxpr(jax.grad(slope))(Q)


def test_float64_is_refused():
    with jax.enable_x64(True):
        args = [x.astype(jnp.float64) for x in (Q, K, V)]
        with pytest.raises(ValueError, match="not float64"):
            on_pallas(*args)
