"""The gradient of attention's bias by kernels of both platforms, as positions need it.

The reference is `implementation="xla"`. Simulated as in `test_attention.py` and
`test_attention_gpu.py`, in blocks of 128 and of 64; and compiled for an H100 and a TPU.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.memory import targets
from jaxmem.ops.attention.dot_product import dot_product_attention
from pallas_kernels import simulated
from pallas_kernels.attention import Extras, Inputs, Rules
from pallas_kernels.attention import gpu as attention_gpu
from pallas_kernels.attention import tpu as attention_tpu
from pallas_kernels.attention.gpu import case as gpu_case
from pallas_kernels.attention.gpu import tables
from pallas_kernels.attention.gpu.bias import visits
from pallas_kernels.attention.tpu import blocks, grid
from tests.arrays import array
from tests.sets import some_fast

AVAILABLE = {t.name for t in targets() if t.available}
needs = lambda chip: pytest.mark.skipif(chip not in AVAILABLE, reason="targets extra")
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
DROPPED = {"dropout_rate": 0.3, "dropout_rng": jax.random.key(23)}
RULES = Rules(scale=0.125, causal=False, window=None, rate=0.0, shared=False)
NAMES = "query", "key", "value", "bias"


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setitem(gpu_case.TILES, "forward", (64, 64))
    monkeypatch.setattr(blocks, "BLOCKS", (128,))


def normal(*shape, seed=0, dtype=F32):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def gradients(implementation, arrays, wanted, mapped=False, **kw):
    """Of the arrays named in `wanted`, under one jit."""
    g = normal(*arrays["query"].shape, seed=9, dtype=arrays["query"].dtype)

    def step(arrays, g):
        attend = lambda some: dot_product_attention(
            **(arrays | some), implementation=implementation, **kw
        )
        return jax.vjp(attend, {name: arrays[name] for name in wanted})[1](g)[0]

    step = jax.vmap(step) if mapped else step
    return jax.block_until_ready(jax.jit(step)(arrays, g))


def check(platform, arrays, wanted=("bias",), **kw):
    """Four roundings of the coarser dtype of two, of the size of the largest result.

    As in `test_attention_gpu.py`: both paths round output and probabilities to the
    dtype of the queries, and a gradient to its own. Kernels in float32 add up some 200
    products in another order: `test_attention.py`'s 5e-6.
    """
    want = gradients("xla", arrays, wanted, **kw)
    with simulated(platform):
        got = gradients("pallas", arrays, wanted, **kw)
    dtype = arrays["query"].dtype
    for name in wanted:
        a, b = got[name], want[name]
        assert a.dtype == b.dtype and a.shape == b.shape
        eps = max(float(jnp.finfo(x).eps) for x in (dtype, a.dtype))
        eps = 5e-6 if dtype == a.dtype == F32 else 4 * eps / 2
        a, b = (np.asarray(x.astype(F32)) for x in (a, b))
        np.testing.assert_allclose(a, b, atol=eps * abs(b).max(), rtol=0)


def inputs(bias, b=2, t=128, s=128, n=2, k=2, h=64, dtype=BF16, bias_dtype=F32):
    sizes = (b, t, n, h), (b, s, k, h), (b, s, k, h)
    made = [normal(*x, seed=i, dtype=dtype) for i, x in enumerate(sizes)]
    made.append(normal(*bias, seed=5, dtype=bias_dtype))
    return dict(zip(NAMES, made, strict=True))


def lengths(of_queries, of_keys):
    named = ("query_seq_lengths", of_queries), ("key_value_seq_lengths", of_keys)
    return {name: jnp.asarray(x, jnp.int32) for name, x in named}


LENGTHS = lengths([128, 40], [50, 128])
IDS = jnp.arange(256, dtype=jnp.int32).reshape(2, 128) // 50
SEGMENTS = {"query_segment_ids": IDS, "key_value_segment_ids": IDS}
MASK = {"mask": (jnp.arange(128)[None] >= jnp.asarray([[70], [3]]))[:, None, None]}
PAIRS = {"mask": normal(1, 2, 128, 128, seed=7) > 0}
CAUSAL = {"is_causal": True}


def cases(*slow):
    return [pytest.param(*x, marks=pytest.mark.slow) for x in slow]


# -- on a GPU


@pytest.mark.parametrize(
    "bias, sizes, kw",
    [
        ((1, 2, 128, 128), {"b": 1, "k": 1}, CAUSAL | DROPPED),
        *cases(
            ((1, 2, 128, 128), {"k": 1}, CAUSAL | DROPPED),
            ((1, 2, 128, 128), {}, LENGTHS),
            ((1, 1, 128, 128), {"dtype": F16, "bias_dtype": BF16}, {}),
            ((1, 1, 128, 128), {"h": 128}, CAUSAL | LENGTHS | DROPPED),
            ((2, 1, 128, 128), {}, CAUSAL | LENGTHS),
            ((2, 2, 128, 128), {"bias_dtype": BF16}, DROPPED),
            ((1, 1, 128, 128), {}, SEGMENTS),
            ((1, 1, 128, 128), {}, PAIRS | {"local_window_size": (60, 9)}),
            ((2, 1, 128, 128), {}, MASK | CAUSAL),
        ),
    ],
)
def test_of_queries_and_keys_on_a_gpu(bias, sizes, kw):
    check("cuda", inputs(bias, **sizes), **kw)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [(2, 1, 1, 128), (1, 2, 1, 128)])
def test_every_gradient_with_a_mask_of_keys_on_a_gpu(mask):
    """The mask is not a part of the bias then, and may differ among heads of a key."""
    mask = normal(*mask, seed=7) > 0
    check("cuda", inputs((1, 2, 128, 128), k=1), NAMES, mask=mask)


@pytest.mark.parametrize(
    "bias, wanted",
    cases(((1, 2, 1, 128), ("bias",)), ((2, 2, 1, 128), NAMES)),
)
def test_of_keys_that_differ_among_heads_of_one_key(bias, wanted):
    check("cuda", inputs(bias, k=1), wanted, **CAUSAL, **DROPPED)


@pytest.mark.slow
def test_two_warpgroups_of_keys_that_differ_among_heads(monkeypatch):
    monkeypatch.setattr(gpu_case, "SHARED_FROM", 64)
    check("cuda", inputs((1, 2, 1, 256), b=1, t=256, s=256, k=1))


@pytest.mark.fast("False-1", "True-3")
@pytest.mark.parametrize("lead", [1, 3])
@pytest.mark.parametrize("by_length", [False, True])
def test_which_sequences_visit_a_tile_of_the_bias(lead, by_length):
    """Against all pairs of the causal mask: those with a mask, and those without."""
    rules = RULES._replace(causal=True)
    kv_len = jnp.asarray([150, 64, 256], jnp.int32) if by_length else None
    arrays = inputs((lead, 1, 256, 256), b=3, t=256, s=256)
    given = Inputs(*arrays.values(), extras=Extras(kv_len=kv_len))
    case = gpu_case.make_case(rules, given, "dbias", (None, None))
    got = np.asarray(visits(case, tables.make_tables(case, given), lead))
    at = np.arange(256)[:, None], np.arange(256)[None]
    lengths = np.asarray([256] * 3 if kv_len is None else kv_len)[:, None, None]
    seen = (at[0] >= at[1]) & (at[1] < lengths)
    seen = np.asarray(seen).reshape(3, 4, 64, 4, 64)
    some, every = seen.any(axis=(2, 4)), seen.all(axis=(2, 4))
    for which, kind in enumerate((some & ~every, every)):
        want = kind.sum(axis=0, keepdims=True) if lead == 1 else kind
        np.testing.assert_array_equal(*np.broadcast_arrays(got[..., which], want))
    assert got.shape[3] == (5 if by_length and lead == 1 else 2)
    if got.shape[3] > 2:
        kind = np.where(every, 1, np.where(some, 0, 2))
        np.testing.assert_array_equal(
            got[0, ..., 2:], np.argsort(np.moveaxis(kind, 0, 2), axis=2, kind="stable")
        )


# -- on a TPU


RAGGED = {"t": 200, "s": 150}


@pytest.mark.parametrize(
    "bias, sizes, kw",
    [
        ((1, 2, 200, 150), {"b": 1, "k": 1, **RAGGED}, CAUSAL | DROPPED),
        *cases(
            ((1, 2, 200, 150), {"k": 1, **RAGGED}, CAUSAL | DROPPED),
            ((1, 2, 1, 150), {"k": 1, "dtype": F32, **RAGGED}, DROPPED),
            ((1, 1, 200, 150), {"n": 4, "k": 4, "dtype": F32, **RAGGED}, CAUSAL),
            ((2, 1, 128, 128), {"dtype": F32}, LENGTHS),
            ((1, 2, 128, 128), {"dtype": F32}, CAUSAL | LENGTHS | DROPPED),
            ((2, 3, 200, 150), {"n": 3, "k": 3, "bias_dtype": BF16, **RAGGED}, {}),
            ((1, 1, 200, 150), {"h": 40, "dtype": F32, **RAGGED}, DROPPED),
            ((2, 1, 1, 150), {"n": 4, "dtype": F32, **RAGGED}, CAUSAL),
            ((1, 1, 128, 128), {"dtype": F32}, SEGMENTS),
            ((1, 1, 128, 128), {"dtype": F32}, PAIRS | {"local_window_size": (60, 9)}),
            ((1, 2, 128, 128), {"dtype": F32}, MASK | CAUSAL),
        ),
    ],
)
def test_on_a_tpu(bias, sizes, kw):
    check("tpu", inputs(bias, **sizes), **kw)


@pytest.mark.slow
@pytest.mark.parametrize("mask", [(2, 1, 1, 150), (2, 1, 200, 150), (2, 2, 200, 1)])
def test_every_gradient_with_a_mask_on_a_tpu(mask):
    """The mask is not a part of the bias, but for the last: that one is of as much."""
    bias = (1, 2, 200, 150) if mask[1] == 1 else (1, 1, 1, 150)
    mask = (normal(*mask, seed=7) > 0).at[..., :9, :].set(True)
    check("tpu", inputs(bias, dtype=F32, **RAGGED), NAMES, mask=mask)


# -- on both


@pytest.mark.parametrize("platform", some_fast(["cuda", "tpu"], "cuda"))
def test_a_bias_that_is_the_same_for_all_keys_has_a_gradient_of_zeros(platform):
    """On a GPU such a bias is supported beside a mask of keys."""
    arrays = inputs((1, 2, 128, 1), s=64)
    mask = jnp.arange(64) < 60
    with simulated(platform):
        got = gradients("pallas", arrays, ("bias",), mask=mask)["bias"]
    assert got.shape == (1, 2, 128, 1) and got.dtype == F32 and not got.any()


@pytest.mark.parametrize(
    "module, name", [(attention_gpu, "jaxmem_"), (attention_tpu, "")]
)
@pytest.mark.parametrize("wanted", ["bias", "q", "k"])
def test_only_what_is_wanted_runs(module, name, wanted):
    arrays = inputs((1, 2, 128, 128))
    q, stats = arrays["query"], jnp.zeros((2, 2, 128))
    run = lambda g: module.backward(
        *(Inputs(*arrays.values()), (q, stats, stats), g),
        RULES,
        wanted=frozenset([wanted]),
    )
    text = str(jax.make_jaxpr(run)(q))
    found = {x for x in ("dbias", "dq", "dkv") if f"{name}attention_{x}" in text}
    assert found == {{"bias": "dbias", "q": "dq", "k": "dkv"}[wanted]}


@pytest.mark.parametrize(
    "platform, call", [*cases(("cuda", "mosaic_gpu")), ("tpu", "tpu")]
)
@pytest.mark.parametrize(
    "bias", [(1, 2, 64, 64), *cases([(1, 2, 1, 64)], [(1, 1, 64, 1)])]
)
def test_lowers_under_shard_map(platform, call, bias):
    """Sequences are divided, and the bias is not: its gradient is summed over them."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    part, whole = PartitionSpec("x"), PartitionSpec()

    def step(q, bias, g):
        how = {"mask": jnp.ones((64,), bool), "implementation": "pallas", **DROPPED}
        attend = lambda bias: dot_product_attention(q, q, q, bias, **how)
        return jax.vjp(attend, bias)[1](g)[0]

    specs = {"in_specs": (part, whole, part), "out_specs": whole}
    step = jax.jit(jax.shard_map(step, mesh=mesh, **specs))
    spec = lambda shape, dtype, how: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, how)
    )
    q = spec((8, 64, 2, 64), BF16, part)
    allowed = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    lowered = export.export(step, platforms=[platform], disabled_checks=allowed)(
        q, spec(bias, F32, whole), q
    )
    assert call in lowered.mlir_module()


@pytest.mark.slow
def test_under_vmap(monkeypatch):
    """As for several models at once: each has a bias of its own."""
    # the simulator cannot map a grid whose dimensions are said to be parallel
    monkeypatch.setattr(grid.pltpu, "CompilerParams", lambda **_: None)
    arrays = inputs((1, 2, 128, 128), b=1)
    arrays = {name: jnp.stack([x, -x]) for name, x in arrays.items()}
    check("cuda", arrays, mapped=True, **CAUSAL, **DROPPED)
    check("tpu", arrays, mapped=True, **CAUSAL, **DROPPED)


# -- compiled for chips that are not there


def position_step(heads: int, **kw):
    """Of arrays as a projection gives them, and every gradient."""

    def step(q, k, v, bias, g, mask):
        def attend(q, k, v, bias):
            q, k, v = (x.reshape(*x.shape[:2], heads, -1) for x in (q, k, v))
            how = {"mask": mask, "implementation": "pallas", **kw}
            return dot_product_attention(q, k, v, bias, **how)

        out, pull = jax.vjp(attend, q, k, v, bias)
        return pull(g.reshape(out.shape))

    return jax.jit(step)


@pytest.mark.slow
@pytest.mark.parametrize("kw", [{}, CAUSAL | DROPPED])
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "chip", [pytest.param(x, marks=needs(x)) for x in ("h100", "tpu-v5e")]
)
def test_nothing_of_all_logits_is_held(chip, x64, kw):
    """8 sequences, 4 heads, 512 positions: less than one byte for each logit.

    What there is: the output, of a quarter of a byte, a copy of the bias for dk and dv
    on a GPU, of half a byte, and numbers for each query and head.
    """
    b, n, length, h = 8, 4, 512, 64
    x = jax.ShapeDtypeStruct((b, length, n * h), BF16)
    bias = jax.ShapeDtypeStruct((1, n, length, length), F32)
    mask = jax.ShapeDtypeStruct((b, 1, 1, length), jnp.bool_)
    with jax.enable_x64(x64):
        step = position_step(n, **kw)
        report = jaxmem.estimate(step, x, x, x, bias, x, mask, target=chip)
    assert report.temp_bytes < b * n * length * length


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("bias", [(1, 1, 512, 512), (2, 1, 512, 512), (2, 4, 512, 512)])
@pytest.mark.parametrize(
    "chip", [pytest.param(x, marks=needs(x)) for x in ("h100", "tpu-v5e")]
)
def test_compiles_for_biases_of_any_shape(chip, bias, dtype):
    x = jax.ShapeDtypeStruct((2, 512, 512), BF16)
    mask = jax.ShapeDtypeStruct((2, 1, 512, 512), jnp.bool_)
    bias = jax.ShapeDtypeStruct(bias, dtype)
    jaxmem.estimate(position_step(4), x, x, x, bias, x, mask, target=chip)


@needs("h100")
@pytest.mark.slow
@pytest.mark.parametrize("length", [512, 4096])
def test_compiles_for_keys_that_differ_among_heads_of_one_key(length):
    """In one warpgroup, and in two."""
    q, k = (jax.ShapeDtypeStruct((1, length, n, 64), BF16) for n in (4, 2))
    bias = jax.ShapeDtypeStruct((1, 4, 1, length), F32)

    def step(q, k, bias, g):
        attend = lambda q, k, bias: dot_product_attention(
            q, k, k, bias, implementation="pallas", **CAUSAL, **DROPPED
        )
        return jax.vjp(attend, q, k, bias)[1](g)

    jaxmem.estimate(jax.jit(step), q, k, bias, q, target="h100")
