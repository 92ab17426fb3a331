"""JAX's splash attention on TPUs: in a simulator it means what XLA's blocks mean."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import ops
from jaxmem.ops.attention import blockwise, splash
from jaxmem.ops.attention.block import Extras, Rules
from pallas_kernels import simulated
from tests.memory.test_estimate import needs_tpu

BF16 = jnp.bfloat16
SDS = jax.ShapeDtypeStruct
B, T, N, H = 2, 256, 4, 128
PLAIN = Rules(1 / math.sqrt(H), False, None, 0.0, False)
CAUSAL = PLAIN._replace(causal=True)
WANTED = frozenset("qkv")
# bfloat16's half of a last place, of the scaled queries, the probabilities, their
# gradients and the results
ROUNDED = 4 * 2.0**-8


def inputs(heads):
    shapes = [(B, T, N, H), (B, T, heads, H), (B, T, heads, H), (B, T, N, H)]
    keys = jax.random.split(jax.random.key(0), 4)
    drawn = [jax.random.normal(key, s) for key, s in zip(keys, shapes, strict=True)]
    return [x.astype(BF16) for x in drawn]


def close(got, want):
    got, want = (np.asarray(x, np.float32) for x in (got, want))
    np.testing.assert_allclose(got, want, atol=ROUNDED * np.abs(want).max(), rtol=0)


@pytest.mark.parametrize(
    "rules, heads",
    [
        (CAUSAL, 2),
        pytest.param(PLAIN, 1, marks=pytest.mark.slow),
        pytest.param(PLAIN._replace(window=(100, 0)), 4, marks=pytest.mark.slow),
        pytest.param(PLAIN._replace(window=(20, 30)), 2, marks=pytest.mark.slow),
        pytest.param(CAUSAL._replace(window=(70, 30)), 4, marks=pytest.mark.slow),
    ],
)
def test_both_passes_after_each_other_and_after_xla(rules, heads, monkeypatch):
    monkeypatch.setattr(splash, "_LARGEST", 128)  # several blocks of a short sequence
    q, k, v, g = inputs(heads)
    assert not splash.refusal(rules, q, k, None, Extras())
    blocks = blockwise.make_blocks(rules, q, k, None)
    plain = blockwise.forward(blocks, q, k, v, None, Extras())
    with simulated("tpu"):
        found = splash.forward(rules, q, k, v, None, Extras())
    close(found[0], plain[0])
    close(found[1] + found[2], plain[1] + plain[2])
    want = blockwise.backward(blocks, WANTED, saved(q, k, v, plain), g)
    for results in (plain, found):
        with simulated("tpu"):
            got = splash.backward(rules, WANTED, saved(q, k, v, results), g)
        assert set(got) == WANTED
        for name in WANTED:
            close(got[name], want[name])


def saved(q, k, v, results):
    named = dict(zip(("o", "top", "log_total"), results, strict=True))
    return {"q": q, "k": k, "v": v, "bias": None, **named, **Extras()._asdict()}


# -- what it takes

Q = SDS((2, 256, 4, 128), BF16)


@pytest.mark.parametrize(
    "word, given",
    [
        ("dropout", {"rules": PLAIN._replace(rate=0.1)}),
        ("float32", {"q": SDS(Q.shape, jnp.float32)}),
        ("heads of 64", {"q": SDS((2, 256, 4, 64), BF16)}),
        ("a bias", {"bias": SDS((1, 4, 256, 256), BF16)}),
        ("197 queries", {"q": SDS((2, 197, 4, 128), BF16)}),
        ("128 queries", {"q": SDS((2, 128, 4, 128), BF16), "rules": CAUSAL}),
        ("may see no key", {"extras": Extras(mask=SDS((2, 1, 256, 256), jnp.bool_))}),
        ("may see no key", {"extras": Extras(kv_len=SDS((2,), jnp.int32))}),
        ("may see no key", {"extras": Extras(q_segments=SDS((2, 256), jnp.int32))}),
    ],
)
def test_what_is_refused(word, given):
    how = {"rules": PLAIN, "q": Q, "k": Q, "bias": None, "extras": Extras()} | given
    assert word in splash.refusal(**how)


def test_long_windows_are_refused_and_long_causal_masks_are_not():
    long = SDS((1, 32768, 8, 128), BF16)
    window = PLAIN._replace(window=(4096, 0))
    assert "at most" in splash.refusal(window, long, long, None, Extras())
    assert not splash.refusal(CAUSAL, long, long, None, Extras())


@pytest.mark.parametrize("length", [384, 1024])
@pytest.mark.parametrize("rules", [PLAIN, CAUSAL])
def test_blocks_that_are_visited(rules, length):
    """Those of the kernels' own list, which looks at every position."""
    q = SDS((1, length, 2, 128), BF16)
    form = splash.form_of(rules, q, q)
    made = splash._kernel(form)
    masks = splash._mask(form)
    block = math.gcd(length, 512)
    at = np.arange(length // block) * block
    whole = np.array(
        [[masks[0, i : i + block, j : j + block] for j in at] for i in at]
    ).reshape(len(at), len(at), -1)
    visited = whole.any(-1).astype(int) + whole.all(-1)
    np.testing.assert_array_equal(made.fwd_mask_info.block_mask[0], visited)
    if rules.causal:
        assert made.fwd_mask_info.q_sequence.shape == (length,)


# -- what is compiled


def loss(q, k, v, **how):
    out = ops.dot_product_attention(q, k, v, is_causal=True, **how)
    return jnp.square(out.astype(jnp.float32)).sum()


def scanned(q, k, v):
    layer = lambda c, _: (ops.dot_product_attention(c, k, v, is_causal=True), None)
    return jax.lax.scan(layer, q, None, 3)[0].astype(jnp.float32).sum()


def products_in(fn, *args):
    """Products of logits' size that a step does; all are in one block here."""
    report = jaxmem.estimate(fn, *args, target="tpu-v5e")
    b, t, n, h = Q.shape
    return report.time.flops / (2 * b * n * h * t * t)


@needs_tpu
@pytest.mark.parametrize(
    "name, products",
    [
        ("plain", 9),
        ("scan", 27),
        pytest.param("vmap", 27, marks=pytest.mark.slow),
        pytest.param("checkpoint", 9, marks=pytest.mark.slow),
    ],
)
def test_compiled_for_a_tpu(name, products):
    grad = jax.grad(loss, (0, 1, 2))
    made = {
        "plain": grad,
        "vmap": jax.vmap(grad),
        "checkpoint": jax.grad(jax.checkpoint(loss), (0, 1, 2)),
        "scan": jax.grad(scanned, (0, 1, 2)),
    }
    args = [SDS((3, *x.shape), x.dtype) if name == "vmap" else x for x in (Q, Q, Q)]
    assert products_in(made[name], *args) == pytest.approx(products, rel=0.01)


@needs_tpu
def test_xla_where_it_is_asked_for():
    grad = jax.grad(partial(loss, implementation="xla"), (0, 1, 2))
    assert products_in(grad, Q, Q, Q) == pytest.approx(7, rel=0.01)
