"""The table of primitives: one record each, and facts that JAX itself confirms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.primitives import KNOWN, Kind
from jaxmem.ir.zeros import gives_zeros

X = jnp.linspace(0.5, 2, 6).reshape(2, 3)
LOOSE = {  # what must hold of any record with the fact on the left
    "moves": lambda p: p.fused and not p.bilinear,
    "view": lambda p: not p.into_first and not p.opaque,
    "elementwise": lambda p: p.fused and p.fusible or p.view,
    "sums": lambda p: not p.exact,
    "commutes": lambda p: p.elementwise,
    "in_chlo": lambda p: p.elementwise or p.kind is Kind.SPECIAL,
}


def equation(fn, *args):
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    return eqn


def test_each_primitive_has_one_record():
    names = [p.name for p in KNOWN]
    assert len(names) == len(set(names)) > 150


@pytest.mark.parametrize("fact", LOOSE)
def test_facts_agree(fact):
    having = [p for p in KNOWN if getattr(p, fact)]
    assert having
    assert [p.name for p in having if not LOOSE[fact](p)] == []


def test_an_unknown_primitive_has_no_facts():
    record = primitives.named("a primitive of tomorrow")
    assert record is primitives.named("a primitive of tomorrow")
    assert record.kind is Kind.CUSTOM
    facts = {"linear", "opaque", "fused", "elementwise", "moves", "exact"}
    assert not any(getattr(record, fact) for fact in facts)
    assert record not in KNOWN


def ragged(x, w):
    return lax.ragged_dot(x, w, jnp.array([1, 1], jnp.int32))


@pytest.mark.parametrize(
    ("asks", "fn", "args"),
    [
        (primitives.is_scan, lambda x: lax.scan(lambda c, r: (c, r), 0.0, x), [X]),
        (primitives.is_loop, lambda x: lax.scan(lambda c, r: (c, r), 0.0, x), [X]),
        (primitives.is_product, lambda x: lax.dot(x, x.T), [X]),
        (primitives.is_product, ragged, [X, jnp.ones((2, 3, 4))]),
        (primitives.is_gather, lambda x: x[jnp.array([1, 0])], [X]),
        (primitives.is_remat, jax.checkpoint(jnp.sin), [X]),
        (primitives.is_jit, jax.jit(jnp.sin), [X]),
        (primitives.is_cast, lambda x: x.astype(jnp.int32), [X]),
        (primitives.is_barrier, lax.optimization_barrier, [X]),
        (primitives.is_transfer, lambda x: jax.device_put(x), [X]),
        (primitives.is_print, lambda x: jax.debug.print("{}", x), [X]),
    ],
)
def test_equations_of_jax_are_told_apart(asks, fn, args):
    eqns = [*jaxprs.walk(jax.make_jaxpr(fn)(*args))]
    assert any(map(asks, eqns))
    assert not asks(equation(lambda x: x + x, X))


def test_calls_have_one_body():
    called = [jax.jit(jnp.sin), jax.checkpoint(jnp.sin), jax.nn.relu]
    for fn in called:
        eqn = equation(fn, X)
        assert primitives.of(eqn).calls
        assert len(jaxprs.bodies(eqn)) == 1


ODD = sorted(primitives.names(lambda p: p.keeps_zero and p.elementwise))


@pytest.mark.parametrize("name", ODD)
def test_zero_is_kept(name):
    fn = getattr(lax, name, None)
    if name == "reduce_precision":
        fn = lambda x: lax.reduce_precision(x, 5, 4)
    x = jnp.zeros(3, jnp.complex64 if name == "real" else jnp.float32)
    eqn = equation(fn, x)
    assert eqn.primitive.name == name
    assert not np.any(fn(x))
    assert gives_zeros(eqn, [True])
    assert not gives_zeros(eqn, [False])


@pytest.mark.parametrize(
    ("fn", "zeros", "found"),
    [
        (lambda x: x * 0.5, [True, False], True),
        (lambda x: x + 0.5, [True, False], False),
        (lambda x: jnp.pad(x, 1, constant_values=1.0), [True, False], False),
        (lambda x: lax.integer_pow(x, 2), [True], True),
        (lambda x: lax.integer_pow(x, -1), [True], False),
        (lambda x: lax.cos(x), [True], False),
        (lambda x: lax.cumsum(x), [True], True),
    ],
)
def test_zeros_give_zeros(fn, zeros, found):
    eqns = [*jaxprs.walk(jax.make_jaxpr(fn)(X))]
    (eqn,) = [e for e in eqns if not jaxprs.bodies(e) and len(e.invars) == len(zeros)]
    assert gives_zeros(eqn, zeros) is found


LINEAR = {
    "neg": lax.neg,
    "transpose": lambda x: x.T,
    "reduce_sum": lambda x: lax.reduce_sum_p.bind(x, axes=(0,), **_reduce_sum_params()),
    "cumsum": lax.cumsum,
    "rev": lambda x: lax.rev(x, (1,)),
    "slice": lambda x: lax.slice(x, (0, 1), (2, 3)),
}


def _reduce_sum_params():
    eqn = equation(lambda x: x.sum(0), X)
    return {k: v for k, v in eqn.params.items() if k != "axes"}


@pytest.mark.parametrize("name", LINEAR)
def test_linear_primitives_are_linear(name):
    fn = LINEAR[name]
    assert primitives.of(equation(fn, X)).linear == slice(1)
    np.testing.assert_array_equal(fn(2 * X), 2 * fn(X))  # powers of two are exact
