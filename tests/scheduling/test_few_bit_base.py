"""Frozen weights of few bits under LoRA: their wide copies are recomputed, not kept."""

import operator

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.ir.dequantized import dequantizing
from jaxmem.ir.graph import JaxprGraph
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from tests.arrays import array

LAYERS, RANK, BLOCK = 6, 2, 8
TABLE = np.linspace(-1, 1, 16, dtype=np.float32)  # stands for NF4's sixteen numbers
KINDS = ("int8", "float8", "table")


def wide(base, kind):
    """A layer's weights, as qwix dequantises them."""
    codes, scale = base["codes"], base["scale"]
    if kind == "table":
        looked_up = jnp.asarray(TABLE)[codes.reshape(-1)]
        blocks = looked_up.reshape(-1, BLOCK, codes.shape[-1])
        by_block = jnp.broadcast_to(scale.reshape(-1, 1, scale.shape[-1]), blocks.shape)
        return (blocks * by_block).reshape(codes.shape)
    return codes.astype(scale.dtype) * jnp.broadcast_to(scale, codes.shape)


def base_of(kind, width):
    rng = np.random.default_rng(0)
    blocks = width // BLOCK if kind == "table" else 1
    scale = array(rng.uniform(0.5, 1, (LAYERS, blocks, width)) / width, jnp.float32)
    shape = (LAYERS, width, width)
    if kind == "table":
        codes = jnp.asarray(rng.integers(0, 16, shape), jnp.uint4)
    elif kind == "float8":
        codes = jnp.asarray(rng.standard_normal(shape), jnp.float8_e4m3fn)
    else:
        codes = jnp.asarray(rng.integers(-127, 128, shape), jnp.int8)
    return {"codes": codes, "scale": scale}


def loss_of(kind, scanned=False):
    """`loss(adapters, base, x)`, of stacks in a scan or of lists of layers."""

    def layer(x, adapter, base):
        y = x @ wide(base, kind) + x @ adapter["a"] @ adapter["b"]
        return jnp.tanh(y)

    def loss(adapters, base, x):
        if scanned:
            body = lambda x, layer_of: (layer(x, *layer_of), None)
            return jnp.sum(jax.lax.scan(body, x, (adapters, base))[0])
        for one in zip(adapters, base, strict=True):
            x = layer(x, *one)
        return jnp.sum(x)

    return loss


def arguments(kind, scanned=False, width=16, rows=4):
    """Adapters, base and inputs."""
    rng = np.random.default_rng(1)
    adapters = {
        "a": array(rng.standard_normal((LAYERS, width, RANK)), jnp.float32),
        "b": array(rng.standard_normal((LAYERS, RANK, width)), jnp.float32),
    }
    x = array(rng.standard_normal((rows, width)), jnp.float32)
    stacks = adapters, base_of(kind, width)
    return (*(stacks if scanned else map(unstacked, stacks)), x)


def problem(kind, scanned=False, width=16, rows=4):
    """A gradient step of the adapters, and its arguments."""

    def step(adapters, base, x):
        grads = jax.grad(loss_of(kind, scanned))(adapters, base, x)
        return jax.tree.map(lambda p, g: p - 0.1 * g, adapters, grads)

    return step, arguments(kind, scanned, width, rows)


def unstacked(stack):
    """A list of layers."""
    return [jax.tree.map(operator.itemgetter(i), stack) for i in range(LAYERS)]


@pytest.mark.fast("int8-scanned", "float8-written out", "table-scanned")
@pytest.mark.parametrize("scanned", [False, True], ids=["written out", "scanned"])
@pytest.mark.parametrize("kind", KINDS)
def test_no_wide_weight_is_kept(kind, scanned):
    step, args = problem(kind, scanned)
    closed, leaves = jax.make_jaxpr(step)(*args), jax.tree.leaves(args)
    made = rewrite(closed, {}, None, Choice("h100"))
    rows = [r for r in made.description.residuals if r.dtype == "float32"]
    # the first layer's input has no gradient, so that its weights are not read
    read = LAYERS if scanned else LAYERS - 1
    wide_bytes = sum(r.bytes for r in rows if r.shape[-2:] == (16, 16))
    assert wide_bytes == read * 16 * 16 * 4
    assert not made.description.recomputed  # nothing that has a price
    got = jaxprs.evaluate(made.jaxpr, leaves)
    for g, w in zip(got, jaxprs.evaluate(closed, leaves), strict=True):
        np.testing.assert_array_equal(g, w)


def test_without_a_target_only_what_gains_clearly():
    step, args = problem("int8")
    assert rewrite(jax.make_jaxpr(step)(*args), {}).description.residuals
    step, args = problem("int8", width=8)
    loss = lambda a, b, x: jnp.sum(jnp.tanh(jnp.tanh(x @ a) @ wide(b, "int8")))
    small = lambda a, b, x: a - jax.grad(loss)(a, b, x)
    closed = jax.make_jaxpr(small)(jnp.ones((8, 8)), args[1][0], args[2])
    # a single weight: the compiler's order may hold it as long
    assert not rewrite(closed, {}).description.residuals
    assert rewrite(closed, {}, None, Choice("h100")).description.residuals


def test_what_is_not_of_arguments_alone_is_left():
    """Codes made inside of the step, and weights that were wide before."""

    def step(w, x):
        codes = jnp.round(w @ w).astype(jnp.int8)
        return x @ codes.astype(jnp.float32) @ w

    ones = jnp.ones((4, 4))
    assert not dequantizing(JaxprGraph(jax.make_jaxpr(step)(ones, ones)))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_bytes(kind):
    """A scan stacks no wide weights; where XLA kept none before, nothing is worse."""
    width = 1024
    for scanned in (False, True):
        step, args = problem(kind, scanned, width=width, rows=width)
        plain = jaxmem.estimate(step, *args, target="h100")
        scheduled = jaxmem.schedule(step, target="h100")
        ours = jaxmem.estimate(scheduled, *args, target="h100")
        # one layer's weights and a transposed copy of them remain
        gone = (LAYERS - 2) * width * width * 4 if scanned else 0
        assert plain.temp_bytes - ours.temp_bytes >= gone
