"""What loops and branches keep, nested in layers and in each other."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.branches import InBranches
from jaxmem.scheduling.recompute.residuals import Recompute
from tests.scheduling.problem import array
from tests.sets import some_fast

L, B, D, N = 4, 16, 8, 3
ROW, WEIGHT = 4 * B * D, 4 * D * D
WS = array(L, D, D, seed=1, scale=0.4, dtype=jnp.float32)
X = array(B, D, seed=2, dtype=jnp.float32)
YES = jnp.float32(0.3)
# float32: what XLA fuses is rounded otherwise, three steps
RTOL = 64 * 2.0**-24
LEAST = 1e-3  # a rate at which products are recomputed too


def layer(x, w):
    return x + jnp.tanh(jnp.sin(x @ w) * x), None


def net(ws, x):
    return lax.scan(layer, x, ws)[0]


def either(ws, x, yes):
    """Layers in a branch."""
    return lax.cond(yes < 1, net, lambda ws, x: x * ws[0, 0, 0], ws, x)


def either_recomputed(ws, x, yes):
    return jax.checkpoint(either)(ws, x, yes)


def switched(ws, x, yes):
    """Three branches, one of them with a loop."""

    def body(x, given):
        w, i = given
        substep = lambda c, _: (c / 2 + jnp.tanh(c @ w) * jnp.sin(c), None)
        branches = [
            lambda x: x + jnp.tanh(jnp.sin(x @ w)),
            lambda x: jnp.sin(x) * x,
            lambda x: lax.scan(substep, x, length=N)[0],
        ]
        return lax.switch(i % 3, branches, x), None

    return lax.scan(body, x, (ws, jnp.arange(L)))[0]


def three_deep(ws, x, yes):
    """A loop in a branch in a loop in a loop."""
    inner = lambda c, _: (c + jnp.tanh(jnp.sin(c) @ ws[0]) * c, None)

    def middle(c, w):
        loop = lambda c: lax.scan(inner, c, length=N)[0]
        c = lax.cond(c.sum() < yes, loop, jnp.cos, c)
        return c + c * jnp.tanh(c @ w), None

    outer = lambda c, _: (lax.scan(middle, c, ws)[0], None)
    return lax.scan(outer, x, length=2)[0]


def with_dropout(ws, x, yes):
    """Keys that are split in a branch."""

    def body(c, given):
        w, key = given

        def kept(c):
            mask = jax.random.bernoulli(jax.random.split(key)[0], 0.8, c.shape)
            return c + jnp.where(mask, jnp.tanh(c @ w) * c, 0.0)

        return lax.cond(c.sum() < 1e3, kept, lambda c: c, c), None

    return lax.scan(body, x, (ws, jax.random.split(jax.random.key(3), L)))[0]


def recurrent(ws, x, yes):
    """Layers of loops over time, with products outside of these and inside."""

    def one(xs, w):
        def cell(h, p):
            h = jnp.tanh(p + h @ w)
            return h, jax.nn.sigmoid(p) * h

        return xs + lax.scan(cell, jnp.zeros_like(x), xs @ w)[1], None

    return lax.scan(one, jnp.stack([x, x + 1]), ws)[0]


FORWARDS = [
    either,
    either_recomputed,
    switched,
    three_deep,
    with_dropout,
    recurrent,
]


def step_of(forward):
    def step(ws, x, yes):
        loss = lambda ws: jnp.mean(forward(ws, x, yes) ** 2)
        value, grads = jax.value_and_grad(loss)(ws)
        return ws - 0.1 * grads, value

    return step


def in_branch(ws, x, yes):
    """A whole step in a branch."""
    step = step_of(lambda ws, x, _: net(ws, x))
    return lax.cond(yes < 1, step, lambda ws, x, _: (ws, yes), ws, x, yes)


def in_while(ws, x, yes):
    """Steps in a loop that ends when it will."""
    step = step_of(lambda ws, x, _: net(ws, x))
    more = lambda c: c[1] < jnp.int32(10 * yes)
    one = lambda c: (step(c[0], x, yes)[0], c[1] + 1)
    return lax.while_loop(more, one, (ws, 0))


STEPS = {f.__name__: step_of(f) for f in FORWARDS}
STEPS |= {f.__name__: f for f in (in_branch, in_while)}


def stacked(closed) -> int:
    """Bytes that the scans of a list stack at most, with those inside of them."""

    def of(body) -> int:
        total = 0
        for eqn in jaxprs.split(body)[0].eqns:
            total += max(map(of, jaxprs.bodies(eqn)), default=0)
            if eqn.primitive.name == "scan":
                ys = eqn.outvars[_compat.scan_counts(eqn)[1] :]
                total += sum(v.aval.size * v.aval.dtype.itemsize for v in ys)
        return total

    return of(closed)


def products(closed, times: int = 1) -> int:
    """How many products are done, loops in full."""
    found = 0
    for eqn in jaxprs.split(closed)[0].eqns:
        inside = times * eqn.params.get("length", 1)
        found += times * (eqn.primitive.name == "dot_general")
        found += sum(products(body, inside) for body in jaxprs.bodies(eqn))
    return found


def rewritten(step, rate=None):
    before = jax.make_jaxpr(step)(WS, X, YES)
    configs = Recompute(rate), InBranches(rate)
    return before, rewrite(before, {}, choice=Choice(configs=configs))


def trained(step):
    ws, values = WS, []
    for _ in range(3):
        ws, value = step(ws, X, YES)
        values.append(value)
    assert float(jnp.abs(ws - WS).max()) > 1e-3
    return ws, values


# of what is stacked before, what may be left: without a rate, and at the least one
LEFT = {
    "either": (0.6, 0.35),
    "either_recomputed": (0.6, 0.35),
    "switched": (0.75, 0.25),
    "three_deep": (0.75, 0.25),
    "with_dropout": (0.75, 0.5),
    "recurrent": (0.75, 0.5),
    "in_branch": (0.6, 0.35),
    "in_while": (0.6, 0.35),
}


@pytest.mark.fast("either", "switched", "three_deep", "recurrent")
@pytest.mark.parametrize("name", some_fast(STEPS, *({*STEPS} - {"in_while"})))
def test_what_is_nested_keeps_less_and_trains_alike(name):
    want, losses = trained(jax.jit(STEPS[name]))
    for rate, left in zip((None, LEAST), LEFT[name], strict=True):
        before, found = rewritten(STEPS[name], rate)
        assert stacked(found.jaxpr) < left * stacked(before)
        run = jax.jit(lambda *args, c=found.jaxpr: jaxprs.evaluate(c, args))
        got, values = trained(run)
        np.testing.assert_allclose(got, want, rtol=RTOL, atol=RTOL)
        np.testing.assert_allclose(values, losses, rtol=RTOL)


@pytest.mark.parametrize("name", sorted(STEPS))
def test_no_product_is_done_twice_without_a_rate(name):
    before, found = rewritten(STEPS[name])
    assert stacked(found.jaxpr) < stacked(before)
    assert products(found.jaxpr) == products(before) > 0
