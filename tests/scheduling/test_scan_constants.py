"""Constants of scans that are made in each iteration, of what is small."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.scans import LARGE, size_of
from jaxmem.memory import estimate
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.moves.inside import Constants, ConstantsInside
from tests.scheduling.problem import array
from tests.scheduling.test_scan_residuals import same_bits, scans

L, T, D = 3, 64, 8


def attention(mask, t=T):
    """Layers of attention with one mask, made in each layer; its loss gradient."""

    def layer(x, w):
        logits = jnp.einsum("bntd,bnsd->bnts", x @ w, x)
        seen = mask(logits.shape)
        p = jax.nn.softmax(jnp.where(seen, logits, -1e30))
        return x + jnp.einsum("bnts,bnsd->bntd", p, x), None

    def loss(ws, x):
        return jnp.sum(lax.scan(layer, x, ws)[0] ** 2)

    return jax.grad(loss), (array(L, D, D, seed=1), array(4, 16, t, D, seed=2))


def causal(shape):
    t, s = (lax.broadcasted_iota(jnp.int32, shape, axis) for axis in (2, 3))
    return t >= s


def drawn(shape):
    return jax.random.bernoulli(jax.random.key(0), 0.5, shape)


def constants(closed) -> list[int]:
    """Bytes of the constants of all scans that are large."""
    eqns = scans(closed)
    found = (v for e in eqns for v in e.invars[: _compat.scan_counts(e)[0]])
    return [size for size in map(size_of, found) if size >= LARGE // 4]


def constants_inside(closed):
    """What the pass makes of a jaxpr; the jaxpr itself where it finds nothing."""
    one, level = ConstantsInside(), Level(closed, {})
    found = list(one.analyse(level, Constants()))
    return one.apply(level, found[0]) if found else closed


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """A mask of 4 * 16 * 64 * 64 is large."""
    monkeypatch.setattr("jaxmem.scheduling.moves.inside.LARGE", LARGE // 4)


def test_a_causal_mask_is_made_in_the_loop():
    fn, args = attention(causal)
    before = jax.make_jaxpr(fn)(*args)
    flat = rewrite(before, {}).jaxpr
    assert 4 * 16 * T * T in constants(before)
    assert constants(flat) == []
    same_bits(before, constants_inside(before), args)
    same_bits(before, flat, args)


def test_what_costs_is_made_once():
    fn, args = attention(drawn)
    before = jax.make_jaxpr(fn)(*args)
    assert 4 * 16 * T * T in constants(rewrite(before, {}).jaxpr)


def test_what_is_made_of_as_much_is_left():
    """A cast of a large argument, and a sum of two: nothing would be saved."""

    def fn(ws, a, b):
        both = a.astype(jnp.float32) + b
        return lax.scan(lambda c, w: (c * w + both, None), jnp.zeros_like(b), ws)[0]

    a, b = array(512, 512, seed=1), array(512, 512, seed=2)
    closed = jax.make_jaxpr(fn)(array(L, 1, 1, seed=3), a, b)
    assert constants_inside(closed) is closed


def test_a_bias_that_is_broadcast_is_kept_small():
    """In one scan; another constant of the same scan stays as it is."""

    def fn(ws, row, whole):
        wide = jnp.broadcast_to(row[:, None], (1024, 1024))
        step = lambda c, w: (jnp.tanh(c * w + wide) @ whole, None)
        return lax.scan(step, jnp.zeros((1024, 1024)), ws)[0]

    row, whole = array(1024, dtype=jnp.float32), array(1024, 1024, dtype=jnp.float32)
    closed = jax.make_jaxpr(fn)(array(L, 1, 1, seed=3, dtype=jnp.float32), row, whole)
    made = constants_inside(closed)
    assert constants(closed) == [2**22, 2**22]
    assert constants(made) == [2**22]
    same_bits(closed, made, (array(L, 1, 1, seed=3, dtype=jnp.float32), row, whole))


@pytest.mark.slow
def test_the_compiler_does_not_move_it_out_again():
    fn, args = attention(causal, 1024)
    mask = 4 * 16 * 1024 * 1024
    closed = jax.make_jaxpr(fn)(*args)
    temps = []
    for jaxpr in (closed, constants_inside(closed)):
        step = lambda *args, j=jaxpr: jaxprs.evaluate(j, list(args))
        temps.append(estimate(step, *args, target="h100").temp_bytes)
    assert temps[0] - temps[1] >= mask


def sums_of_matrices(base):
    """Matrices that a scan sums, of which each is made of one and two numbers."""

    def loss(a):
        term = lambda acc, s: (acc + jnp.exp(a * base * s) * jnp.tanh(base + s), None)
        return jnp.mean(lax.scan(term, jnp.zeros_like(base), jnp.arange(3.0))[0] ** 2)

    return jax.grad(loss)(jnp.float32(0.5))


def test_what_is_made_of_a_constant_of_the_same_scans_is_no_other_constant():
    base = array(256, 256, seed=1, dtype=jnp.float32)
    before = jax.make_jaxpr(sums_of_matrices)(base)
    # the factor of the numbers is hoisted out of both scans
    after = constants_inside(rewrite(before, {}).written_out)
    assert len(constants(before)) == len(constants(after)) + 1
    same_bits(before, after, [base])


def test_a_constant_that_a_product_reads_stays():
    base = array(256, 256, seed=1, dtype=jnp.float32)

    def fn(a):
        twice = a * base
        step = lambda c, _: (jnp.sin(c @ twice + base), None)
        return lax.scan(step, jnp.ones((256, 256), jnp.float32), length=3)[0]

    closed = jax.make_jaxpr(fn)(jnp.float32(2))
    assert constants_inside(closed) is closed
