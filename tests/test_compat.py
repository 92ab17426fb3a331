"""Each private name of JAX that jaxmem leans on, called once: fails when JAX moves."""

import jax
import jax.numpy as jnp

from jaxmem import _compat


def test_saved_residuals_lists_avals_and_sources():
    kept = _compat.saved_residuals(lambda x: jnp.sum(jnp.sin(x)), jnp.ones(3))
    assert [aval.shape for aval, _ in kept] == [(3,)]
    assert all(isinstance(source, str) for _, source in kept)


def test_jaxpr_types():
    closed = jax.make_jaxpr(lambda x: x + 1.0)(1.0)
    assert isinstance(closed, _compat.ClosedJaxpr)
    assert isinstance(closed.jaxpr, _compat.Jaxpr)
    (eqn,) = closed.jaxpr.eqns
    assert isinstance(eqn, _compat.JaxprEqn)
    assert isinstance(eqn.primitive, _compat.Primitive)
    assert isinstance(eqn.invars[0], _compat.Var)
    assert isinstance(eqn.invars[1], _compat.Literal)
