"""Graphs that are deeper than Python's stack: nothing recurses along a chain.

A chain is longer than the limit of recursion, whatever a level of it takes.
"""

import sys

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.ir.flatten import flatten
from jaxmem.scheduling.order.sequence import in_sequence
from jaxmem.scheduling.predict.operations import operations_of
from tests.sets import some_fast

LEAVES = 340  # each takes three frames of a walk that recurses
LONG = 1100  # operations, each of which takes a frame at least
LAYERS, WIDTH = 3, 8


def test_the_chains_are_deeper_than_the_stack():
    limit = sys.getrecursionlimit()
    assert 3 * LEAVES > limit and LONG > limit


def loss(p, x):
    layer = lambda h, w: (jnp.tanh(h @ w), None)
    h = jax.lax.scan(layer, x, p["stack"])[0]
    for b in p["small"]:
        h = h + b
    return jnp.mean(h**2)


def leaves():
    stack = jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH
    small = [jnp.full((1, WIDTH), 0.01) for _ in range(LEAVES)]
    return {"stack": stack, "small": small}, jnp.ones((4, WIDTH))


def clipped(p, x):
    gradient = jax.grad(loss)(p, x)
    tx = optax.clip_by_global_norm(1.0)
    updates, _ = tx.update(gradient, tx.init(p))
    return optax.apply_updates(p, jax.tree.map(lambda u: -0.1 * u, updates))


def by_norm_of_parameters(p, x):
    rate = 1e-2 * jnp.sqrt(sum(jnp.sum(w**2) for w in jax.tree.leaves(p)))
    return jax.tree.map(lambda w, g: w - rate * g, p, jax.grad(loss)(p, x))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step", "clip"),
    [(clipped, "two_pass"), (by_norm_of_parameters, None)],
)
def test_a_number_of_many_leaves_is_computed_before_a_scan(step, clip):
    p, x = leaves()
    scheduled = jaxmem.schedule(step, donate_argnums=0, clip=clip)
    plan = scheduled.plan(p, x)
    assert [g.released for g in plan.gradients] == [True]


def chain(x, of=jnp.sin):
    for _ in range(LONG):
        x = of(x)
    return x


def elementwise(p, x):
    return jnp.mean(chain(x @ p["w"]) ** 2)


def terms(p, x):
    total = jnp.sum(x)
    for _ in range(LONG):
        total = total + p["b"]
    return total * jnp.mean(p["w"])


def numbers(p, x):
    """What a rewrite folds to a number: a chain of literals."""
    return jnp.mean(x @ p["w"]) * chain(jnp.float32(0.5), lambda n: n * 0.5 + 0.5)


def views(p, x):
    w = p["w"]
    for _ in range(LONG):
        w = w.T
    return jnp.mean(jax.nn.gelu(x @ w) ** 2)


def stacked(p, x):
    """The scan reads what is made of the parameters without cost."""
    xs = p["w"]
    for _ in range(LONG):
        xs = jnp.swapaxes(xs, 1, 2)
    return jnp.mean(jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, xs)[0] ** 2)


LOSSES = [elementwise, terms, numbers, views, stacked]
each = pytest.mark.parametrize("of", LOSSES, ids=lambda f: f.__name__)


def arguments(of):
    shape = (LAYERS, WIDTH, WIDTH) if of is stacked else (WIDTH, WIDTH)
    return {"w": jnp.ones(shape) / WIDTH, "b": jnp.float32(0.1)}, jnp.ones((4, WIDTH))


def step_of(of):
    def step(p, x):
        value, gradient = jax.value_and_grad(of)(p, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, p, gradient), value

    return step


@pytest.mark.parametrize(
    "of", some_fast(LOSSES, numbers, views), ids=lambda f: f.__name__
)
def test_a_step_is_scheduled(of):
    plan = jaxmem.schedule(step_of(of), donate_argnums=0).plan(*arguments(of))
    assert plan.plain is None


@pytest.mark.fast("numbers", "views")
@each
def test_a_step_is_linted(of):
    assert jaxmem.lint(step_of(of), *arguments(of), donate_argnums=0) is not None


@pytest.mark.parametrize(
    "of", some_fast(LOSSES, terms, numbers, views, stacked), ids=lambda f: f.__name__
)
def test_residuals_are_listed(of):
    assert jaxmem.residuals(of, *arguments(of)).total_bytes > 0


@pytest.mark.parametrize("of", LOSSES[:3], ids=lambda f: f.__name__)
def test_formulas_are_looked_for(of):
    args = arguments(of)
    lean = jaxmem.substitute(of)
    with pytest.warns(UserWarning, match="nothing to replace"):
        shapes = jax.eval_shape(lean, *args)
    assert shapes == jax.eval_shape(of, *args)


def test_what_no_array_is_made_of_is_computed_by_its_reader():
    args = arguments(elementwise)
    closed = flatten(jax.make_jaxpr(elementwise)(*args))
    ops = operations_of(closed)
    again = in_sequence(ops, range(len(ops.graph.operations)))
    assert len(again.jaxpr.eqns) >= LONG


def test_rows_of_a_table_are_updated_by_many_operations():
    def step(table, ids):
        gradient = jax.grad(lambda t: jnp.sum(t[ids] ** 2))(table)
        return table - chain(gradient)

    table, ids = jnp.ones((4096, 128)), jnp.arange(8)
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    (of_table,) = scheduled.plan(table, ids).gradients
    assert of_table.released
