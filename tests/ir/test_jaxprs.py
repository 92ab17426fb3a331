"""Jaxprs are walked, run and rebuilt whatever their equations hold."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.ir import jaxprs

X = jnp.arange(6.0).reshape(2, 3)


def nested(x):
    def step(c, y):
        return jax.checkpoint(jnp.sin)(c + y), jax.lax.cond(
            y[0] > 1, jnp.cos, jnp.tanh, y
        )

    return jax.lax.scan(step, x[0], x, reverse=True)


def test_trace_holds_what_is_not_an_array():
    def fn(x, flag, *, name):
        return {name: x if flag else -x}

    traced = jaxprs.trace(fn, X, False, name="y")
    assert len(traced.leaves) == 1
    outs = jaxprs.evaluate(traced.jaxpr, traced.leaves)
    np.testing.assert_array_equal(jax.tree.unflatten(traced.out_tree, outs)["y"], -X)


def test_walk_sees_nested_bodies():
    names = [e.primitive.name for e in jaxprs.walk(jax.make_jaxpr(nested)(X))]
    assert {"scan", "cond", "sin", "cos", "tanh"} <= set(names)
    assert names.index("scan") < names.index("sin")


def test_evaluate_with_a_rule():
    def rule(eqn, args):
        return [args[0] * 0] if eqn.primitive.name == "sin" else None

    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(x) + 1)(X)
    np.testing.assert_array_equal(jaxprs.evaluate(jaxpr, [X], rule)[0], X * 0 + 1)


def test_rebind_keeps_the_rest():
    table = np.arange(3.0, dtype=np.float32)  # a constant of the new bodies

    def add(body):
        return jaxprs.retrace(
            body, lambda args: [o + table for o in jaxprs.evaluate(body, args)]
        )

    def rebuilt(x):
        jaxpr = jax.make_jaxpr(nested)(x)

        def rule(eqn, args):
            new = [add(b) for b in jaxprs.bodies(eqn)]
            return (
                jaxprs.rebind(eqn, args, new) if eqn.primitive.name == "scan" else None
            )

        return jaxprs.evaluate(jaxpr, [x], rule)

    before = jax.make_jaxpr(nested)(X).jaxpr.eqns[-1]
    after = [
        e for e in jax.make_jaxpr(rebuilt)(X).jaxpr.eqns if e.primitive.name == "scan"
    ]
    assert after[0].params["reverse"] and before.params["reverse"]
    carry, _ = rebuilt(X)
    want = X[0]
    for y in X[::-1]:
        want = jnp.sin(want + y) + table
    np.testing.assert_allclose(carry, want, rtol=1e-6)


def test_rebind_gives_a_checkpoint_its_constants():
    table = np.arange(3.0, dtype=np.float32)
    jaxpr = jax.make_jaxpr(jax.checkpoint(jnp.sin))(X)

    def run(x):
        eqn = jaxpr.jaxpr.eqns[-1]
        body = jaxprs.bodies(eqn)[0]
        new = jaxprs.retrace(body, lambda args: [jnp.sin(args[0]) * table[None]])
        return jaxprs.rebind(eqn, [x], [new])[0]

    np.testing.assert_allclose(run(X), jnp.sin(X) * table[None], rtol=1e-6)
    slope = jax.grad(lambda x: run(x).sum())(X)
    np.testing.assert_allclose(slope, jnp.cos(X) * table[None], rtol=1e-6)


def test_the_body_of_a_call_is_that_of_what_has_its_inputs_and_outputs():
    loop = lambda x: jax.lax.while_loop(lambda x: x[0, 0] < 3, jnp.exp, x)
    each = lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, length=2)[0]
    either = lambda x: jax.lax.cond(True, jnp.sin, jnp.cos, x)
    calls = {
        jax.jit(jnp.sin): ["sin"],
        jax.checkpoint(jnp.sin): ["sin"],
        **dict.fromkeys((loop, each, either, jnp.sin)),
    }
    for fn, names in calls.items():
        eqn = jax.make_jaxpr(fn)(X).eqns[-1]
        body = jaxprs.called(eqn)
        found = body and [e.primitive.name for e in jaxprs.walk(body)]
        assert found == names, eqn.primitive.name
