"""A `cond` whose predicate is of no layer, against the same done layer by layer."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem
from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.flatten import flatten
from jaxmem.ir.placements import Placements, at
from jaxmem.ir.placements.layers import placements_of
from jaxmem.ir.placements.lower import PartValues
from tests.arrays import array

L, M = 3, 4


def normal(*shape, seed=0):
    values = np.random.default_rng(seed).standard_normal(shape)
    return array(values, jnp.float32)


G, OLD, SEEDS, FLAT = normal(L, M, M), normal(L, M, 2), jnp.arange(L), normal(M, M)


def decomposed(g, old, seeds):
    """Operands by layers alone, one made of no layer, another of a number a layer."""
    place = lax.broadcasted_iota(jnp.int32, (M, 2), 0) + jnp.int32(1)
    place = jnp.broadcast_to(place, (L, M, 2)) * seeds[:, None, None]
    y = lax.dot_general(g, old, (((2,), (1,)), ((0,), (0,))))
    return lax.linalg.qr(y + place.astype(y.dtype), full_matrices=False)[0]


def kept(g, old, seeds):
    return old


CASES = {
    "decomposed": lambda due: lax.cond(due, decomposed, kept, G, OLD, SEEDS),
    "the other way": lambda due: lax.cond(due, kept, decomposed, G, OLD, SEEDS),
    "constants": lambda due: lax.cond(
        due, lambda g: jnp.zeros_like(g), lambda g: g + FLAT[None], G
    ),
    "two outputs": lambda due: lax.cond(
        due,
        lambda g, old: (g.sum((1, 2)), old.mT + g[:, :2]),
        lambda g, old: (g[:, 0, 0], jnp.ones((L, 2, M))),
        *(G, OLD),
    ),
}


def equation(fn, *args):
    (eqn,) = (
        e
        for e in flatten(jax.make_jaxpr(fn)(*args)).jaxpr.eqns
        if e.primitive.name == "cond"
    )
    return eqn


def with_operands(name):
    """(equation, operands, axes of those that are known to be layers)."""
    found = {}

    def bind(eqn, values):
        if eqn.primitive.name == "cond":
            found["eqn"], found["values"] = eqn, values
        return None

    closed = flatten(jax.make_jaxpr(CASES[name])(True))
    jaxprs.evaluate(closed, [jnp.asarray(True)], bind)
    known = [x.shape == G.shape for x in found["values"]]
    return found["eqn"], found["values"], [0 if k else None for k in known]


@pytest.mark.fast(
    "decomposed-1",
    "the other way-0",
    "the other way-1",
    "constants-1",
    "two outputs-1",
)
@pytest.mark.parametrize("due", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_layer_by_layer_is_all_at_once(name, due):
    eqn, (_, *operands), axes = with_operands(name)
    treated = placements_of(eqn, [*map(at, axes)])
    assert isinstance(treated, Placements), treated
    assert treated.in_axes[0] is None
    assert set(treated.out_axes) == {0}
    index = jnp.int32(due)
    whole = _compat.bind(eqn, [index, *operands])
    given = dict(zip(eqn.invars, [index, *operands], strict=True))
    layers = []
    for j in range(L):
        cut = lambda v, axis, whole, j=j: lax.dynamic_slice_in_dim(whole(v), j, 1, axis)
        layers.append(PartValues(given.__getitem__, cut).outputs(eqn, treated))
    for want, *got in zip(whole, *layers, strict=True):
        np.testing.assert_allclose(jnp.concatenate(got), want, rtol=1e-5, atol=1e-6)


REFUSED = {
    "which branch it takes depends on the layer": (
        lambda g, n: lax.cond(n > 0, jnp.sin, jnp.cos, g), (0, 0)
    ),
    "`reduce_sum`: it combines the layers": (
        lambda g, n: lax.cond(n > 0, lambda g: g - g.sum(0)[None], jnp.cos, g),
        (None, 0),
    ),
    "`sort`: it is along the layers": (
        lambda g, n: lax.cond(n > 0, lambda g: lax.sort(g, dimension=0), jnp.cos, g),
        (None, 0),
    ),
    "an output of it does not run along the layers": (
        lambda g, n: lax.cond(n > 0, lambda g: (g, n), lambda g: (g, -n), g), (None, 0)
    ),
    "different axes": (
        lambda g, n: lax.cond(n > 0, lambda g: g.transpose(1, 0, 2), jnp.cos, g),
        (None, 0),
    ),
    "`iota`: its output is not of layers": (
        lambda g, n: lax.cond(
            n > 0,
            lambda g: g * lax.broadcasted_iota(jnp.float32, (L, L, M), 0),
            jnp.cos,
            g,
        ),
        (None, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize("text", REFUSED)
def test_what_is_not_layer_by_layer_is_refused(text):
    fn, (index, axis) = REFUSED[text]
    eqn = equation(fn, normal(L, L, M), jnp.int32(1))
    axes = [index] + [axis if v.aval.ndim == 3 else None for v in eqn.invars[1:]]
    reason = placements_of(eqn, [*map(at, axes)])
    assert isinstance(reason, str), reason
    assert text in reason


def test_a_refresh_is_released_from_a_backward_scan():
    """A step as it is written: state that is made anew of the gradient now and then."""

    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        return jnp.mean(lax.scan(layer, x, params)[0] ** 2)

    def step(params, basis, count, x):
        g = jax.grad(loss)(params, x)
        due = count % 2 == 0
        basis = lax.cond(due, decomposed, kept, g, basis, SEEDS)
        low = lax.dot_general(basis, g, (((1,), (1,)), ((0,), (0,))))
        back = lax.dot_general(basis, low, (((2,), (1,)), ((0,), (0,))))
        return params - 0.1 * back, basis, count + 1

    scheduled = jaxmem.schedule(step, donate_argnums=())
    args = (0.5 * G, OLD, jnp.int32(0))
    donated = jaxmem.schedule(step, donate_argnums=(0, 1, 2))
    plan = donated.plan(*args, normal(2, M))
    assert plan.kept_bytes == 0, str(plan)
    assert plan.released_bytes == G.nbytes
    got, want = args, args
    for i in range(3):
        x = normal(2, M, seed=i)
        got, want = scheduled(*got, x), jax.jit(step)(*want, x)
    np.testing.assert_allclose(got[0], want[0], rtol=1e-4, atol=1e-5)
