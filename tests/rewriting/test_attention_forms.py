"""Attention as decoders write it: heads in groups, masks, scores' type, dropout."""

import functools
import itertools

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem import rewriting
from tests.arrays import array
from tests.references import kept_bytes
from tests.sets import slow_unless, some_fast

B, T, H, K, D = 2, 64, 4, 2, 8
RATE = 0.1
HEADS = ("in groups", "repeated", "concatenated")
MASKS = ("none", "where", "add", "lowest")


def dropped(p, key):
    keep = jax.random.bernoulli(key, 1 - RATE, p.shape)
    return jnp.where(keep, p / (1 - RATE), 0.0)


def masked(scores, mask):
    causal = jnp.tril(jnp.ones((T, T), bool))
    if mask == "add":
        added = jnp.where(causal, 0.0, -1e9).astype(scores.dtype)
        return scores + jnp.broadcast_to(added, scores.shape)
    lowest = {"where": -1e9, "lowest": jnp.finfo(scores.dtype).min}
    return scores if mask == "none" else jnp.where(causal, scores, lowest[mask])


def attention(q, k, v, key, *, heads, wide, dropout, mask, bias=None):
    """Queries [B, T, H, D], keys and values [B, T, K, D]; gives [B, T, H * D]."""
    if heads == "in groups":
        q = q.reshape(B, T, K, H // K, D)
        to_scores, to_output = "btkgd,bskd->bkgts", "bkgts,bskd->btkgd"
    else:
        k, v = (
            jnp.repeat(x, H // K, 2)
            if heads == "repeated"
            else jnp.concatenate([x, x], 2)
            for x in (k, v)
        )
        to_scores, to_output = "bthd,bshd->bhts", "bhts,bshd->bthd"
    scores = jnp.einsum(to_scores, q, k)
    scores = scores.astype(jnp.float32) if wide else scores
    scores = scores / D**0.5
    if bias is not None:
        scores += jnp.broadcast_to(bias.astype(scores.dtype), scores.shape)
    p = jax.nn.softmax(masked(scores, mask), -1)
    p = dropped(p, key) if dropout else p
    return jnp.einsum(to_output, p.astype(v.dtype), v).reshape(B, T, H * D)


def arguments(dtype):
    rng = np.random.default_rng(0)
    shapes = ((B, T, H, D), (B, T, K, D), (B, T, K, D))
    return [array(rng.standard_normal(s), dtype) for s in shapes]


def _forms():
    """All; fast are each pair of heads and mask, and each pair of other options."""
    for i, j in itertools.product(range(len(HEADS)), range(len(MASKS))):
        for wide, dropout in itertools.product((False, True), repeat=2):
            fast = (wide, dropout) == ((i + j) % 2 == 1, (i + j // 2) % 2 == 1)
            form = HEADS[i], wide, dropout, MASKS[j]
            yield pytest.param(*form, marks=slow_unless(fast))


@pytest.mark.parametrize("heads, wide, dropout, mask", [*_forms()])
def test_every_form_is_found(heads, wide, dropout, mask):
    form = functools.partial(
        attention, heads=heads, wide=wide, dropout=dropout, mask=mask
    )
    args = (*arguments(jnp.bfloat16), jax.random.key(0))
    report = rewriting.find(form, *args)
    assert report.counts == {"dot_product_attention": 1}, str(report)


# with a bias over keys, over queries and keys, of each head, and of each group
BIASES = ((1, 1, 1, 1, T), (1, K, H // K, T, T), (1, K, 1, 1, T))
ADDED = [
    *((mask, None) for mask in MASKS),
    *(("where", bias) for bias in BIASES),
    ("add", BIASES[1]),
]


@pytest.mark.fast(
    "float32-none-None",
    "float32-where-None",
    "float32-lowest-None",
    "float32-where-bias4",
    "float32-where-bias6",
    "float32-add-bias7",
)
@pytest.mark.parametrize(("mask", "bias"), ADDED)
@pytest.mark.parametrize("dtype", some_fast(["float32", "bfloat16"], "float32"))
def test_groups_have_the_values_and_gradients_of_the_plain_form(dtype, mask, bias):
    """Within what `tests/references.py` allows, against float64."""
    args, key = arguments(dtype), jax.random.key(0)
    if bias is not None:
        args.append(array(np.random.default_rng(1).standard_normal(bias), dtype))
    g = np.cos(np.arange(B * T * H * D)).reshape(B, T, H * D)

    def form(q, k, v, *bias):
        how = {"wide": True, "dropout": False, "mask": mask, "heads": "in groups"}
        return attention(q, k, v, key, **how, bias=bias[0] if bias else None)

    def run(fn, args):
        out, pull = jax.vjp(fn, *args)
        return [out, *pull(array(g, out.dtype))]

    plain = jax.jit(functools.partial(run, form))(args)
    lean = jax.jit(functools.partial(run, rewriting.rewrite(form)))(args)
    with jax.enable_x64(True):
        exact = jax.jit(functools.partial(run, form))(
            [array(x, "float64") for x in args]
        )
    for a, b, c in zip(lean, plain, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        far = lambda x, c=c: float(np.abs(np.float64(x) - np.float64(c)).max())
        most = float(np.abs(np.float64(c)).max())
        assert far(a) <= 4 * float(jnp.finfo(dtype).eps) * most + 2 * far(b)


@pytest.mark.fast("none", "where")
@pytest.mark.parametrize("mask", MASKS)
def test_groups_draw_the_masks_of_heads_in_one_axis(mask):
    """Dropout in groups is that of the form which repeats the keys, bit for bit."""
    args, key = arguments("float32"), jax.random.key(3)
    found = []
    for heads in ("in groups", "repeated"):
        form = functools.partial(
            attention, heads=heads, wide=True, dropout=True, mask=mask
        )
        lean = rewriting.rewrite(form)

        @jax.jit
        def run(args, fn=lean):
            out, pull = jax.vjp(lambda q, k, v: fn(q, k, v, key), *args)
            return [out, *pull(jnp.cos(out))]

        found.append(run(args))
    eps = float(jnp.finfo("float32").eps)
    for a, b in zip(*found, strict=True):
        # keys that are repeated have their gradients summed in another order
        np.testing.assert_allclose(a, b, atol=8 * eps * float(jnp.abs(b).max()))


def test_nothing_of_the_size_of_scores_is_kept():
    form = functools.partial(
        attention, heads="in groups", wide=True, dropout=True, mask="where"
    )
    args = (*arguments("bfloat16"), jax.random.key(0))
    kept = kept_bytes(rewriting.rewrite(form), args, frozenset(range(3)))
    assert kept < B * H * T * T < kept_bytes(form, args, frozenset(range(3)))


def by_module(x, dropout, project):
    """Attention written out in a model, with the model's own Dropout inside."""
    q, k, v = (project(x, n).reshape(B, T, n, D) for n in (H, K, K))
    scores = jnp.einsum("btkgd,bskd->bkgts", q.reshape(B, T, K, H // K, D), k)
    p = dropout(jax.nn.softmax(masked(scores / D**0.5, "where"), -1))
    return jnp.einsum("bkgts,bskd->btkgd", p, v).reshape(B, T, H * D)


class InLinen(nn.Module):
    """Its layers are made where they are called."""

    @nn.compact
    def __call__(self, x):
        dropout = nn.Dropout(RATE, deterministic=False)
        return by_module(x, dropout, lambda x, n: nn.Dense(n * D)(x))


class InNnx(nnx.Module):
    """As in nanoGPT."""

    def __init__(self, rngs):
        heads = H, K, K
        self.layers = nnx.List([nnx.Linear(H * D, n * D, rngs=rngs) for n in heads])
        self.dropout = nnx.Dropout(RATE, rngs=rngs)

    def __call__(self, x):
        layers = iter(self.layers)
        return by_module(x, self.dropout, lambda x, n: next(layers)(x))


@pytest.mark.parametrize("make", [InLinen, lambda: InNnx(nnx.Rngs(0))])
def test_a_dropout_layer_does_not_hide_attention(make):
    report = jaxmem.nn.report(jaxmem.substitute(make()), jnp.ones((B, T, H * D)))
    assert "dot_product_attention" in str(report.patterns)
    assert any(e.module == "Dropout" and e.replaced_by for e in report.modules)
    assert report.residuals is not None
    assert report.residuals.total_bytes < 4 * B * H * T * T
