"""Transformer blocks: equal to plain Flax layers, and what they keep."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx as flax_nnx

from examples import transformer_blocks_nnx
from examples.transformer_blocks import (
    LlamaBlock,
    TransformerBlock,
    rotary_embedding,
)
from jaxmem.ir import jaxprs as _jaxpr
from tests.nn.compare import assert_close, drawn, kept_bytes
from tests.sets import some_fast

B, S, D, F, H, K = 2, 8, 16, 32, 4, 2
N = B * S
X = jax.random.normal(jax.random.key(0), (B, S, D))
SOME = jax.random.bernoulli(jax.random.key(1), 0.7, (B, 1, S, S))
MASK = SOME | jnp.eye(S, dtype=bool)[None, None]


class PlainBlock(nn.Module):
    """The block in Flax's own layers, with the same names."""

    norm: str
    causal: bool

    @nn.compact
    def __call__(self, x, mask=None):
        if self.causal:
            causal = nn.make_causal_mask(x[..., 0], dtype=bool)
            mask = nn.combine_masks(causal, mask, dtype=bool)
        attention = nn.MultiHeadDotProductAttention(H, name="attention")
        first = nn.LayerNorm(name="attention_norm")
        second = nn.LayerNorm(name="mlp_norm")
        up, down = nn.Dense(F, name="up"), nn.Dense(D, name="down")
        if self.norm == "pre":
            x = x + attention(first(x), mask=mask)
            return x + down(nn.gelu(up(second(x))))
        x = first(x + attention(x, mask=mask))
        return second(x + down(nn.gelu(up(x))))


def plain_llama(variables, x, mask=None):
    """The Llama block in `jax.numpy`."""
    p = variables["params"]

    def rms_norm(x, scale):
        rstd = jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)
        return x * rstd * scale[None, None]

    def turned(x):
        half = x.shape[-1] // 2
        rate = 10_000.0 ** (-jnp.arange(half, dtype=jnp.float32) / half)
        angle = jnp.outer(jnp.arange(S, dtype=jnp.float32), rate)[None, :, None]
        rotation = jax.lax.complex(jnp.cos(angle), jnp.sin(angle))
        z = jax.lax.complex(x[..., :half], x[..., half:]) * rotation
        return jnp.concatenate([z.real, z.imag], -1)

    y = rms_norm(x, p["attention_norm"]["scale"])
    project = lambda name: jnp.einsum(
        "bsd,dnh->bsnh", y, p["attention"][name]["kernel"]
    )
    q, k, v = turned(project("query")), turned(project("key")), project("value")
    k, v = (jnp.repeat(z, H // K, axis=2) for z in (k, v))
    logits = jnp.einsum("btnh,bsnh->bnts", q, k) / (D // H) ** 0.5
    seen = jnp.tril(jnp.ones((1, 1, S, S), bool))
    seen = seen if mask is None else seen & mask
    weights = jax.nn.softmax(jnp.where(seen, logits, -1e30))
    heads = jnp.einsum("bnts,bsnh->btnh", weights, v)
    x = x + jnp.einsum("btnh,nhd->btd", heads, p["attention"]["out"]["kernel"])
    y = rms_norm(x, p["mlp_norm"]["scale"])
    gate, up = (y @ p[name]["kernel"] for name in ("gate", "up"))
    return x + (jax.nn.silu(gate) * up) @ p["down"]["kernel"]


def loss(apply):
    def value(params, x, mask=None):
        return jnp.sum(jnp.sin(apply({"params": params}, x, mask)))

    return value


def gradients(apply, params, mask=MASK):
    return jax.jit(jax.value_and_grad(loss(apply), (0, 1)))(params, X, mask)


BLOCKS = {
    "pre": (TransformerBlock(H, F), PlainBlock("pre", False).apply),
    "causal": (
        TransformerBlock(H, F, causal=True),
        PlainBlock("pre", True).apply,
    ),
    "post": (TransformerBlock(H, F, "post"), PlainBlock("post", False).apply),
    "llama": (LlamaBlock(H, F, K), plain_llama),
}


@functools.cache
def parameters(name: str):
    return drawn(BLOCKS[name][0], X)["params"]


@pytest.mark.parametrize("name", some_fast(BLOCKS, "pre"))
def test_equals_plain_layers(name):
    block, plain = BLOCKS[name]
    params = parameters(name)
    assert_close(gradients(plain, params), gradients(block.apply, params))


@pytest.mark.fast("pre")
@pytest.mark.parametrize("name", ["pre", "post"])
def test_parameters_are_those_of_flax(name):
    plain = drawn(PlainBlock(name, False), X)["params"]
    assert jax.tree.map(jnp.shape, plain) == jax.tree.map(jnp.shape, parameters(name))


def test_nnx_equals_linen():
    block, _ = BLOCKS["llama"]
    rngs = flax_nnx.Rngs(0)
    model = transformer_blocks_nnx.LlamaBlock(D, H, F, num_kv_heads=K, rngs=rngs)
    graph, state = flax_nnx.split(model)
    params = parameters("llama")
    flat = {name: p for name, p in params.items() if name != "attention"}
    flat |= params["attention"]
    named = flax_nnx.to_pure_dict(state)
    assert jax.tree.map(jnp.shape, named) == jax.tree.map(jnp.shape, flat)

    def apply(params, x):
        flax_nnx.replace_by_pure_dict(state, params)
        return flax_nnx.merge(graph, state)(x)

    want = jax.jit(block.apply)({"params": params}, X)
    assert_close(want, jax.jit(apply)(flat, X))
    kept = kept_bytes(lambda params, x: jnp.sum(jnp.sin(apply(params, x))), flat, X)
    assert KEPT["llama"] <= kept <= KEPT["llama"] + 1500


STATISTICS = 4 * B * H * S * 2  # of the softmax
NORM = 2 * (4 * N + 4 * N + 4)  # variance, and one guarded channel, of both norms
KEPT = {
    "pre": 4 * (6 * N * D + N * F) + STATISTICS + NORM,
    "post": 4 * (6 * N * D + N * F) + STATISTICS + NORM,
    "llama": 4 * (4 * N * D + 2 * N * D * K // H + 2 * N * F) + STATISTICS + NORM,
}


@pytest.mark.parametrize("name", KEPT)
def test_keeps_each_array_once(name):
    """Rotary angles and masks are made from nothing, a few hundred bytes."""
    block, _ = BLOCKS[name]
    kept = kept_bytes(loss(block.apply), parameters(name), X)
    assert KEPT[name] <= kept <= KEPT[name] + 1500


def products(fn, *args) -> int:
    eqns = _jaxpr.walk(_jaxpr.split(jax.make_jaxpr(fn)(*args))[0])
    return sum(e.primitive.name == "dot_general" for e in eqns)


@pytest.mark.parametrize("name", ["pre", "post"])
def test_no_matmul_but_that_of_logits_is_done_twice(name):
    block, plain = BLOCKS[name]
    ours, theirs = (
        products(jax.grad(loss(apply), (0, 1)), parameters(name), X)
        for apply in (block.apply, plain)
    )
    # what a checkpoint recomputes and drops is still in the jaxpr: its dense layer
    assert ours <= theirs + 2


@pytest.mark.slow
def test_in_a_scan_over_layers():
    class Layer(nn.Module):
        @nn.compact
        def __call__(self, x, _):
            return TransformerBlock(H, F, name="block")(x), None

    stack = nn.scan(
        Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=3
    )()
    params = drawn(stack, X, None)["params"]
    layers = [jax.tree.map(lambda p, i=i: p[i], params["block"]) for i in range(3)]
    want, bare = X, TransformerBlock(H, F)
    for layer in layers:
        want = bare.apply({"params": layer}, want)
    assert_close(want, stack.apply({"params": params}, X, None)[0])


@pytest.mark.slow
def test_dropout():
    block = TransformerBlock(H, F, dropout_rate=0.1)
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = block.init(keys, X, deterministic=False)
    drop = lambda key: block.apply(
        variables, X, deterministic=False, rngs={"dropout": jax.random.key(key)}
    )
    assert jnp.array_equal(drop(1), drop(1)) and not jnp.array_equal(drop(1), drop(2))
    still = block.apply(variables, X, deterministic=True)
    assert_close(still, TransformerBlock(H, F).apply(variables, X))


def test_rotary_embedding_turns_with_the_distance():
    """Scores depend on the distance of two positions alone."""
    q, k = jax.random.normal(jax.random.key(0), (2, 1, 1, 1, 8))
    score = lambda i, j: jnp.sum(
        rotary_embedding(q, first=i) * rotary_embedding(k, first=j)
    )
    assert_close(score(3, 1), score(12, 10), roundings=256)
