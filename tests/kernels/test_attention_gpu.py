"""Attention's kernels for Hopper: values in the simulator, and compiled for an H100.

The reference is `implementation="xla"`, which has tests of its own. Simulated are
copies, barriers, loops and arithmetic; products are not Mosaic's there.
Blocks are of 64.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem.memory import targets
from jaxmem.ops.attention import blockwise
from jaxmem.ops.attention.dot_product import dot_product_attention
from jaxmem.ops.randomness.bits import seed_words
from pallas_kernels import simulated
from pallas_kernels.attention import Extras, Inputs, Rules, dropout_mask, dropout_row
from pallas_kernels.attention import gpu as attention_gpu
from pallas_kernels.attention.gpu import case as gpu_case
from pallas_kernels.attention.gpu import grid, streams, tables
from pallas_kernels.attention.gpu.case import make_case
from pallas_kernels.attention.gpu.dropout import LARGEST_RATE
from pallas_kernels.attention.gpu.tables import row_statistics
from pallas_kernels.attention.inputs import visible
from pallas_kernels.hashing import half_of, half_threshold, kept
from tests.arrays import array
from tests.sets import some_fast

AVAILABLE = {t.name for t in targets() if t.available}
needs_gpu = pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")
over_edges = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="the simulator of jax 0.10.2 refuses copies over an edge, which TMA fills",
)
KEY = jax.random.key(23)
DROPPED = {"dropout_rate": 0.3, "dropout_rng": KEY}
PLAIN = Rules(scale=0.125, causal=False, window=None, rate=0.0, shared=False)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setitem(gpu_case.TILES, "forward", (64, 64))


def normal(*shape, seed=0, dtype=F32):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(b=1, t=128, s=128, n=2, k=1, h=64, dtype=BF16):
    sizes = ((b, t, n, h), (b, s, k, h), (b, s, k, h))
    return tuple(normal(*x, seed=i, dtype=dtype) for i, x in enumerate(sizes))


def run(implementation, q, k, v, *bias, mapped=False, **kw):
    """The output and the gradients of q, k and v, under one jit."""

    def step(q, k, v):
        attend = lambda q, k, v: dot_product_attention(
            *(q, k, v, *bias), implementation=implementation, **kw
        )
        out, pull = jax.vjp(attend, q, k, v)
        return out, *pull(normal(*out.shape, seed=9).astype(out.dtype))

    step = jax.vmap(step) if mapped else step
    return jax.block_until_ready(jax.jit(step)(q, k, v))


def check(args, **kw):
    """Four roundings of q's dtype.

    Both paths round probabilities and their gradients before a product and the result
    after it; the kernel rounds probabilities before they are divided by their sum, the
    reference after. Errors are of the size of the largest result.
    """
    want = run("xla", *args, **kw)
    with simulated("cuda"):
        got = run("pallas", *args, **kw)
    for a, b in zip(got, want, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        a, b = (np.asarray(x.astype(F32)) for x in (a, b))
        atol = 4 * float(jnp.finfo(args[0].dtype).eps) / 2 * abs(b).max()
        np.testing.assert_allclose(a, b, atol=atol, rtol=0)


# -- values and gradients


def test_causal_with_dropout_and_shared_keys():
    check(qkv(), is_causal=True, **DROPPED)


def test_segments_and_a_bias_of_keys():
    segments = jnp.arange(128, dtype=jnp.int32)[None] // 50
    bias = normal(1, 1, 1, 64, seed=5)
    check(
        (*qkv(s=64, n=1, h=128, dtype=F16), bias),
        query_segment_ids=segments,
        key_value_segment_ids=segments[:, :64],
    )


@pytest.mark.parametrize(
    "shape, dtype, alone, kw",
    [
        ((1, 1, 1, 128), F32, True, {"is_causal": True, **DROPPED}),
        ((2, 2, 1, 128), BF16, False, {}),
    ],
)
@pytest.mark.slow
def test_gradient_of_a_bias_of_keys(shape, dtype, alone, kw):
    """With those of q, k and v, and alone, so that none of them is computed."""
    bias = normal(*shape, seed=5, dtype=dtype)
    q, k, v = qkv(b=2, n=2, k=shape[1])
    g = normal(*q.shape, seed=9, dtype=BF16)

    def gradients(implementation):
        def attend(bias, *qkv):
            inputs = *(qkv or (q, k, v)), bias
            return dot_product_attention(*inputs, implementation=implementation, **kw)

        args = (bias,) if alone else (bias, q, k, v)
        return jax.jit(lambda *args: jax.vjp(attend, *args)[1](g))(*args)

    want = gradients("xla")
    with simulated("cuda"):
        got = gradients("pallas")
    assert got[0].dtype == dtype and got[0].shape == shape
    for a, b in zip(got, want, strict=True):
        # As in `check`; roundings of what a sum over queries adds up average out.
        a, b = (np.asarray(x.astype(F32)) for x in (a, b))
        atol = 4 * float(jnp.finfo(BF16).eps) / 2 * abs(b).max()
        np.testing.assert_allclose(a, b, atol=atol, rtol=0)


@needs_gpu
@pytest.mark.slow
def test_compiles_the_gradient_of_a_bias_of_keys():
    """Kept are the output, 1 MiB, and numbers for each query, key and head."""
    q, bias = spec(1, 4096, 2, 64), spec(1, 2, 1, 4096, dtype=F32)
    attend = lambda q, bias: dot_product_attention(
        q, q, q, bias, implementation="pallas"
    )
    step = lambda q, bias, g: jax.vjp(attend, q, bias)[1](g)
    report = jaxmem.estimate(jax.jit(step), q, bias, q, target="h100")
    assert report.temp_bytes < 6 * 2**20


def test_bias_of_queries_and_keys():
    """Some rows see nothing but -1e9."""
    bias = jnp.where(normal(1, 2, 128, 64, seed=5) < -1, -1e9, normal(1, 2, 128, 64))
    bias = bias.at[:, :, :7].set(-1e9)
    check((*qkv(s=64), bias), broadcast_dropout=True, **DROPPED)


@pytest.mark.slow
def test_mask_of_keys():
    """Padding on the left, so that with a causal mask the first queries see nothing."""
    mask = (jnp.arange(128) >= 70)[None, None, None]
    check(qkv(n=1), mask=mask, is_causal=True, **DROPPED)


@pytest.mark.slow
@pytest.mark.parametrize("shape", [(2, 1, 128, 64), (1, 2, 128, 64), (1, 1, 128, 1)])
def test_mask_of_queries_and_keys(shape):
    """Some rows see nothing; the bias is added to what is seen."""
    mask = (normal(*shape, seed=7) > 0).at[:, :, :9].set(False)
    bias = normal(1, 1, 1, 64, seed=5)
    check((*qkv(b=2, s=64), bias), mask=mask, local_window_size=(30, 9))


@over_edges
@pytest.mark.slow
def test_mask_of_lengths_that_fill_no_word():
    mask = normal(1, 1, 72, 104, seed=7) > 0
    check(qkv(t=72, s=104, n=1), mask=mask, is_causal=True, **DROPPED)


def test_a_mask_in_words():
    mask = normal(2, 1, 136, 72, seed=7) > 0
    inputs = Inputs(*qkv(b=2, t=136, s=72), extras=Extras(mask=mask))
    case = make_case(PLAIN, inputs, "forward", (64, 64))
    words = np.asarray(tables.make_tables(case, inputs).rest["mask"])
    assert words.shape == (2, 1, 4, 192) and words.dtype == np.uint32
    bits = (words[:, :, :, None] >> np.arange(32)[:, None]) & 1
    bits = bits.reshape(2, 1, 128, 192).swapaxes(2, 3)
    np.testing.assert_array_equal(bits[:, :, :136, :72], mask)
    assert bits.sum() == mask.sum()


@over_edges
def test_lengths_and_rows_that_see_nothing():
    """A block that holds such a row visits all keys; others few, or one for none."""
    lengths = jnp.asarray([[136, 0], [0, 70]], jnp.int32)
    kw = {"query_seq_lengths": lengths[0], "key_value_seq_lengths": lengths[1]}
    check(qkv(b=2, t=136, s=104, n=1), is_causal=True, **kw, **DROPPED)


@over_edges
@pytest.mark.slow
def test_window_that_ends_before_the_last_queries():
    check(qkv(t=200, s=72, n=1), local_window_size=(20, 3), **DROPPED)


@pytest.fixture
def two_warpgroups(monkeypatch):
    """As for long sequences."""
    monkeypatch.setattr(gpu_case, "SHARED_FROM", 64)


@pytest.mark.parametrize(
    "length, heads", [(128, 1), pytest.param(256, 2, marks=pytest.mark.slow)]
)
def test_two_warpgroups(two_warpgroups, length, heads):
    check(qkv(t=length, s=length, n=heads), is_causal=True, **DROPPED)


@over_edges
@pytest.mark.slow
def test_two_warpgroups_of_which_one_has_nothing(two_warpgroups):
    """The second half of a block of queries is not there, and that of one of keys."""
    check(qkv(b=2, t=192, s=320, n=1), is_causal=True, **DROPPED)


@pytest.mark.slow
def test_two_warpgroups_without_a_mask(two_warpgroups):
    check((*qkv(t=256, s=128), normal(1, 1, 1, 128, seed=5)))


@pytest.mark.slow
def test_two_warpgroups_with_a_bias_and_a_mask_of_pairs(two_warpgroups):
    """Each reads its own part of both, for two blocks of queries and two of keys."""
    bias, mask = normal(1, 1, 256, 256, seed=5), normal(1, 1, 256, 256, seed=7) > -1
    check((*qkv(t=256, s=256, n=1), bias), mask=mask, is_causal=True, **DROPPED)


@pytest.mark.slow
def test_mask_of_pairs_with_blocks_that_are_not_visited():
    mask = normal(1, 1, 128, 128, seed=7) > -1
    check(qkv(n=1), mask=mask, is_causal=True)


@over_edges
@pytest.mark.slow
def test_two_warpgroups_with_a_bias_of_which_one_has_nothing(two_warpgroups):
    check((*qkv(t=192, s=320, n=1), normal(1, 1, 192, 320, seed=5)), is_causal=True)


@pytest.mark.slow
@pytest.mark.parametrize("kw", [{}, DROPPED], ids=["bare", "dropout"])
def test_programs_that_take_several_blocks(two_warpgroups, monkeypatch, kw):
    """Three programs for 8 or more blocks: some take one more than others."""
    monkeypatch.setattr(grid, "multiprocessors_in_context", lambda: 3)
    monkeypatch.setattr(gpu_case, "OF_TWO_BARE", {})
    check(qkv(b=2, t=256, s=256, n=2, k=2), **kw)


@pytest.mark.slow
def test_the_largest_tiles():
    """With no block size given, as `dot_product_attention` calls the kernels."""
    check(qkv(t=512, s=512))


@pytest.mark.parametrize(
    "alike, sizes, programs",
    [(True, (2, 5), 3), (False, (2, 5), None), (True, (1, 3), None)],
)
def test_how_many_programs_there_are(monkeypatch, alike, sizes, programs):
    """One for each block, unless they are many of equal work."""
    monkeypatch.setattr(grid, "multiprocessors_in_context", lambda: 3)
    sizes = dict(zip(("heads", "blocks"), sizes, strict=True))
    assert grid.make_grid(sizes, alike) == grid.Grid(sizes, programs)


def test_tiles_have_room_for_masks_and_dropout():
    """The largest are for programs that have neither."""
    inputs = Inputs(*qkv(t=512, s=512))

    def tile(kernel, rules=PLAIN, **extras):
        some = inputs._replace(extras=Extras(**extras))
        return make_case(rules, some, kernel, (None, None)).tile

    assert tile("forward") == gpu_case.OF_TWO_BARE["forward"]
    lengths = jnp.full((1,), 300, jnp.int32)
    for less in (
        tile("forward", PLAIN._replace(causal=True)),
        tile("forward", PLAIN._replace(rate=0.5), seed=jnp.zeros(2, jnp.uint32)),
        tile("forward", kv_len=lengths),
    ):
        assert less == gpu_case.OF_TWO["forward"]
    assert tile("forward", q_len=lengths) == gpu_case.OF_TWO_BARE["forward"]
    pairs = jnp.ones((1, 1, 512, 512), bool)
    assert tile("forward", mask=pairs) == gpu_case.OF_TWO_MASK
    assert tile("forward", mask=pairs[:, :, :1]) == gpu_case.OF_TWO["forward"]
    inputs = inputs._replace(bias=pairs.astype(BF16))
    assert tile("forward") == gpu_case.OF_TWO_BIAS
    assert (
        tile("dq") == gpu_case.OF_TWO_PAIRS and tile("dbias") == gpu_case.TILES["dbias"]
    )


@pytest.mark.slow
def test_tiles_with_a_mask_before_and_after_those_without():
    check(qkv(t=256, s=256, n=1), local_window_size=(130, 70), **DROPPED)


def test_a_last_block_of_keys_that_is_not_full():
    """No query has a mask, and the last tile of each is masked all the same."""
    case = make_case(PLAIN, Inputs(*qkv(s=72)), "forward", (64, 64))
    found = streams.spans([0, 0, 72 // 64, case.kv_blocks], False)
    assert found == [(0, 1, False), (1, 2, True)]


WHERE = {
    "causal": (True, None, None),
    "more keys": (True, None, None),
    "window": (False, (130, 70), None),
    "left window": (True, (100, 0), None),
    "lengths": (False, None, (0, 150)),
    "causal, lengths": (True, None, (70, 300)),
    "window, lengths": (False, (90, 200), (150, 64)),
    "ends early": (False, (10, 3), None),
}


@pytest.mark.parametrize("block", some_fast([(128, 64), (64, 128)], (128, 64)))
@pytest.mark.parametrize("name", WHERE)
def test_blocks_that_are_visited_and_blocks_without_a_mask(name, block):
    """Against all pairs: what is not visited is hidden, what has no mask is seen."""
    causal, window, lengths = WHERE[name]
    t, s = 328, 456 if name == "more keys" else 264
    rules = PLAIN._replace(causal=causal, window=window)
    extras = Extras(kv_len=None if lengths is None else jnp.asarray(lengths))
    inputs = Inputs(*qkv(b=2, t=t, s=s), extras=extras)
    case = make_case(rules, inputs, "dq", block)
    made = tables.make_tables(case, inputs)
    at = jnp.arange(t)[None, :, None], jnp.arange(s)[None, None]
    limit = None if lengths is None else extras.kv_len[:, None, None]
    seen = np.broadcast_to(visible(rules, *at, kv_len=limit), (2, t, s)).copy()
    nothing = ~seen.any(axis=2)
    visited = seen | nothing[..., None]

    def in_blocks(x, of, padding):
        sides = (0, 0), (0, -t % block[0]), (0, -s % block[1])
        x = np.pad(x, sides, constant_values=padding)
        x = x.reshape(2, -1, block[0], x.shape[2] // block[1], block[1])
        return of(x, axis=(2, 4))

    some, every = in_blocks(visited, np.any, False), in_blocks(seen, np.all, True)
    every[..., s // block[1] :] = False  # a block that is not full has a mask
    for rows, transpose in ((made, False), (tables.transposed(case, made), True)):
        blocks = np.broadcast_to(
            rows.rest["blocks"], (2, *rows.rest["blocks"].shape[1:])
        )
        places = np.arange(some.shape[1 if transpose else 2])
        first, whole, past, stop = (blocks[..., x, None] for x in range(4))
        assert (first <= whole).all() and (whole <= past).all() and (past <= stop).all()
        visits = (first <= places) & (places < stop)
        bare = (whole <= places) & (places < past)
        if transpose:
            visits, bare = visits.swapaxes(1, 2), bare.swapaxes(1, 2)
        assert (visits >= some).all()
        assert (bare <= every).all()
        # All of them but in blocks of queries where some row sees nothing.
        calm = ~in_blocks(nothing[..., None] & np.ones_like(seen), np.any, False)
        assert bare.sum() == (every & calm & visits).sum()


@pytest.mark.slow
@pytest.mark.parametrize("scale", [-0.5, 0.0, 3.0])
def test_scale(scale):
    check(qkv(n=1), scale=scale)


@pytest.mark.slow
def test_values_under_x64():
    with jax.enable_x64(True):
        check(qkv(t=64, s=128), is_causal=True, **DROPPED)


def test_traces_under_x64():
    with jax.enable_x64(True):
        args = qkv()
        run = gradients(is_causal=True, local_window_size=(50, 2), **DROPPED)
        got = jax.eval_shape(run, *args, args[0])
    assert [x.dtype for x in got] == [BF16] * 3


@pytest.mark.slow
def test_values_under_vmap():
    args = (jnp.stack([x, x[..., ::-1]]) for x in qkv(t=64, s=128))
    check(tuple(args), mapped=True, is_causal=True, **DROPPED)


def test_row_statistics():
    """Those of the XLA path, so that either backward pass can read them."""
    q, k, v = qkv(t=64, n=1)
    with simulated("cuda"):
        _, top, log_total = attention_gpu.forward(Inputs(q, k, v), PLAIN)
    logits = jnp.einsum("btnh,bsnh->bnts", *(x.astype(F32) for x in (q, k))) * 0.125
    np.testing.assert_allclose(top, logits.max(-1), rtol=1e-6)
    total = jnp.exp(logits - logits.max(-1, keepdims=True)).sum(-1)
    np.testing.assert_allclose(log_total, jnp.log(total), rtol=1e-6)


# -- extreme values


@over_edges
@pytest.mark.parametrize("height", [100.0, -1e4])
def test_rows_past_the_queries_weigh_nothing(height):
    """Copies fill a block with queries of zeros, whose logits are the bias alone."""
    check((*qkv(t=72, s=64, n=1), jnp.full((1, 1, 1, 64), height)))


def test_statistics_of_rows_past_the_queries():
    """No logit is above that of a row which is not there."""
    case = make_case(PLAIN, Inputs(*qkv(t=72, s=64, n=1)), "forward", (64, 64))
    zeros = jnp.zeros((1, 1, 72))
    got = row_statistics(case, zeros, zeros, None, apart=True)
    assert (got["top"][..., 72:] == jnp.inf).all() and got["top"].shape[-1] == 128
    lengths = jnp.asarray([70], jnp.int32)
    got = row_statistics(case, zeros, zeros + 1, lengths, apart=False)
    assert (got["top"][..., 70:] == jnp.inf).all()
    np.testing.assert_allclose(got["top"][..., :70], 1 / np.log(2), rtol=1e-6)


@pytest.mark.slow
def test_hidden_rows_whatever_hides_them():
    """A row of -3e8, -4e8 ... is the mean of all values, as 0 is: so are gradients."""
    low = -1e8 * (3 + jnp.arange(64.0))
    low = low.at[:3].set(jnp.asarray([-1e30, -jnp.inf, jnp.finfo(F32).min]))
    bias = jnp.broadcast_to(low[:, None], (64, 64))[None, None]
    bias = bias.at[0, 0, 1, 0].set(0)  # all of -inf is NaN, as it is in `jax.nn`
    check((*qkv(t=64, s=64, n=1), bias))


@pytest.mark.slow
def test_queries_beyond_their_sequence_by_statistics_of_the_reference():
    """The reference says of them what it says of rows that see nothing."""
    q, k, v = qkv(t=64, s=64, n=1)
    inputs = Inputs(q, k, v, extras=Extras(q_len=jnp.asarray([40], jnp.int32)))
    blocks = blockwise.make_blocks(PLAIN, q, k, None)
    o, *stats = blockwise.forward(blocks, q, k, v, None, inputs.extras)
    g, wanted = normal(*q.shape, seed=9, dtype=BF16), frozenset("qkv")
    with simulated("cuda"):
        args = inputs, (o, *stats), g, PLAIN
        got = attention_gpu.backward(*args, wanted=wanted)[:3]
        mine = attention_gpu.forward(inputs, PLAIN)
        want = attention_gpu.backward(inputs, mine, g, PLAIN, wanted=wanted)[:3]
    for a, b in zip(got, want, strict=True):
        a, b = (np.asarray(x.astype(F32)) for x in (a, b))
        eps = float(jnp.finfo(BF16).eps)
        np.testing.assert_allclose(a, b, atol=eps * abs(b).max(), rtol=0)


# -- dropout


def mask_of(rules, seed, b, n, t, s):
    shape = b, n, t, s
    at = [jax.lax.broadcasted_iota(jnp.uint32, shape, axis) for axis in range(4)]
    return np.asarray(
        dropout_mask(rules, seed, dropout_row(rules, *at[:3], n, t), at[3])
    )


def test_dropout_bits_are_those_of_the_reference():
    """Of all three kernels: unit vectors make each bit an element of a result."""
    b, t, s, n, h = 2, 64, 64, 2, 64
    rules = PLAIN._replace(rate=0.5)
    seed = seed_words(KEY)
    want = mask_of(rules, seed, b, n, t, s)
    q = jnp.zeros((b, t, n, h), BF16)
    unit = jnp.broadcast_to(jnp.eye(s, h, dtype=BF16)[:, None], (b, s, n, h))
    inputs = Inputs(q, unit, unit, extras=Extras(seed=seed))
    ones, units = jnp.ones_like(q), jnp.broadcast_to(unit[:, :t], q.shape)
    with simulated("cuda"):
        o, *stats = attention_gpu.forward(inputs, rules)
        back = lambda g, wanted: attention_gpu.backward(
            inputs, (o, *stats), g, rules, wanted=frozenset(wanted)
        )
        dq, dv = back(ones, "q")[0], back(units, "v")[2]
    # o: 2 / s where kept. dq: 2 - 2 (kept part) or minus that. dv: 2 / s where kept.
    by_head = lambda x: np.asarray(jnp.swapaxes(x, 1, 2).astype(F32))
    np.testing.assert_array_equal(by_head(o) > 0, want)
    np.testing.assert_array_equal(by_head(dq) > 0, want)
    np.testing.assert_array_equal(by_head(dv)[..., :t] > 0, want.swapaxes(2, 3))


@pytest.mark.parametrize("rate", [2**-15, 0.1, 0.5, LARGEST_RATE])
def test_half_a_word_compares_as_float16(rate):
    """As `hashing.kept` compares its 15 bits, whether it is a number or not."""
    halves = np.arange(2**16, dtype=np.uint16)
    threshold = np.uint16(half_threshold(rate)).view(np.float16)
    size = np.abs(halves.view(np.float16))
    got = (size >= threshold) | np.isnan(size)
    assert not np.isnan(threshold)
    words = halves.astype(np.uint32)
    rows = np.uint32(1), np.uint32(0)
    for column, word in ((0, words), (1, words << np.uint32(16))):
        half = half_of(np.uint32(column))
        np.testing.assert_array_equal(got, kept(rows, word, half, rate))


def test_a_rate_above_what_float16_compares():
    inputs = Inputs(*qkv(), extras=Extras(seed=seed_words(KEY)))
    with pytest.raises(NotImplementedError, match="up to 0.96875 alone, not 0.98"):
        attention_gpu.forward(inputs, PLAIN._replace(rate=0.98))


# -- what is refused


@pytest.mark.parametrize(
    "change, message",
    [
        ({"dtype": F32}, "bfloat16 and float16 alone, not float32"),
        ({"h": 32}, "heads of 64 and 128 alone, not of 32"),
        ({"t": 100}, "lengths that 8 divides alone, not 100 queries and 128 keys"),
        ({"block_q": 96}, "blocks that 64 divides alone, not 96 queries"),
        ({"bias": (1, 1, 128, 1)}, "a bias of .* alone"),
        ({"t": 72, "bias": (1, 1, 72, 128)}, "a bias that differs among queries where"),
    ],
)
def test_what_it_does_is_said(change, message):
    change = dict(change)
    bias = change.pop("bias", None)
    blocks = {"blocks": (change.pop("block_q", None), None)}
    args = *qkv(**change), None if bias is None else jnp.zeros(bias)
    with pytest.raises(NotImplementedError, match=message):
        attention_gpu.forward(Inputs(*args), PLAIN, **blocks)


# -- compiled for an H100 that is not there


def spec(*shape, dtype=BF16):
    return jax.ShapeDtypeStruct(shape, dtype)


def gradients(**kw):
    def step(q, k, v, g, *bias):
        attend = lambda q, k, v: dot_product_attention(
            *(q, k, v, *bias), implementation="pallas", **kw
        )
        return jax.vjp(attend, q, k, v)[1](g)

    return jax.jit(step)


def compiled_temp_bytes(b, t, s, n, k, h, *bias, dtype=BF16, **kw) -> int:
    q, key = spec(b, t, n, h, dtype=dtype), spec(b, s, k, h, dtype=dtype)
    args = (q, key, key, q, *bias)
    return jaxmem.estimate(gradients(**kw), *args, target="h100").temp_bytes


@needs_gpu
@pytest.mark.slow
def test_nothing_of_all_pairs_is_compiled():
    """16 heads of 64 over 8192 positions: less than one byte a pair of one head.

    What there is: the output, 16 MiB, and numbers for each query and head.
    """
    length = 8192
    kw = {"dropout_rate": 0.1, "dropout_rng": KEY}
    assert compiled_temp_bytes(1, length, length, 16, 16, 64, **kw) < 24 * 2**20


@needs_gpu
@pytest.mark.slow
def test_a_mask_is_read_as_bits():
    """8192 by 8192: 8 MiB of words, beside less than 2 MiB of numbers a query."""
    x, mask = spec(1, 8192, 16, 64), spec(1, 1, 8192, 8192, dtype=jnp.bool_)

    def step(q, k, v, g, mask):
        attend = lambda q, k, v: dot_product_attention(
            q, k, v, mask=mask, implementation="pallas"
        )
        out, pull = jax.vjp(attend, q, k, v)
        return out, pull(g)

    report = jaxmem.estimate(jax.jit(step), x, x, x, x, mask, target="h100")
    assert report.temp_bytes < 10 * 2**20


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16])
@pytest.mark.parametrize("h", [64, 128])
def test_compiles_with_causal_mask_and_shared_keys(h, dtype):
    kw = {"is_causal": True, **DROPPED}
    assert compiled_temp_bytes(2, 1024, 1024, 4, 2, h, dtype=dtype, **kw) < 2**22


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("bias", [(1, 4, 512, 512), (2, 1, 1, 512)])
def test_compiles_with_bias(bias):
    compiled_temp_bytes(2, 512, 512, 4, 2, 64, spec(*bias, dtype=F32), **DROPPED)
    compiled_temp_bytes(2, 512, 512, 4, 2, 64, spec(*bias, dtype=BF16))


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("mask", [(1, 4, 512, 512), (2, 1, 1, 512), (1, 1, 512, 1)])
def test_compiles_with_mask(mask):
    kw = {"is_causal": True, **DROPPED}
    mask = jnp.ones(mask, bool).at[..., :3].set(False)
    compiled_temp_bytes(2, 512, 512, 4, 2, 64, mask=mask, **kw)


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
def test_compiles_over_edges_with_lengths_segments_and_window(x64):
    ids = {
        "query_segment_ids": jnp.zeros((2, 200), jnp.int32),
        "key_value_segment_ids": jnp.zeros((2, 136), jnp.int32),
    }
    lengths = {
        "query_seq_lengths": jnp.asarray([200, 3], jnp.int32),
        "key_value_seq_lengths": jnp.asarray([136, 0], jnp.int32),
    }
    kw = {**ids, **lengths, "local_window_size": (100, 3), "broadcast_dropout": True}
    with jax.enable_x64(x64):
        compiled_temp_bytes(2, 200, 136, 4, 4, 64, is_causal=True, **kw, **DROPPED)


@needs_gpu
@pytest.mark.slow
def test_compiles_under_vmap():
    step = jax.vmap(gradients(is_causal=True, **DROPPED))
    q, k = spec(3, 2, 256, 4, 64), spec(3, 2, 256, 2, 64)
    jaxmem.estimate(jax.jit(step), q, k, k, q, target="h100")


def test_one_gradient_asks_for_no_more_than_it_needs():
    """That of v alone: one kernel, which takes neither v nor the output."""
    q, k, _ = qkv()
    stats = jnp.zeros((1, 2, 128))
    run = lambda g: attention_gpu.backward(
        *(Inputs(q, k), (None, stats, stats), g, PLAIN), wanted=frozenset("v")
    )
    dq, dk, dv, dbias = jax.eval_shape(run, q)
    assert dq is dk is dbias is None and dv.shape == k.shape


def for_cuda(fn, *args) -> str:
    """The text of a module that is lowered for a GPU."""
    allowed = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    how = {"platforms": ["cuda"], "disabled_checks": allowed}
    return export.export(jax.jit(fn), **how)(*args).mlir_module()


@pytest.mark.parametrize("causal", [False, True])
def test_kernels_declare_their_products(causal):
    """In the forward pass, for queries, and for keys; with a mask of whole blocks."""
    q = spec(2, 256, 2, 64)
    text = for_cuda(gradients(is_causal=causal), q, q, q, q)
    found = {int(x) for x in re.findall(r'flops = "(\d+)"', text)}
    blocks = 4 * 5 // 2 if causal else 4 * 4  # of 64 by 64
    one = 2 * (2 * 2) * blocks * 64 * 64 * 64
    assert found == {products * one for products in (2, 3, 4)}


def test_lowers_under_shard_map():
    """Outputs vary over the mesh as the reference's do, or shard_map refuses them."""
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    part = PartitionSpec("x")
    step = jax.shard_map(gradients(**DROPPED), mesh=mesh, in_specs=part, out_specs=part)
    place = NamedSharding(mesh, part)
    q, k = (jax.ShapeDtypeStruct((8, 64, n, 64), BF16, sharding=place) for n in (2, 1))
    assert "mosaic_gpu" in for_cuda(step, q, k, k, q)
