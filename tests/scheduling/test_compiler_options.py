"""What XLA is told besides: a GPU need not fill the stacks of scanned layers."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.memory.time.fills import OPTION
from jaxmem.scheduling._compiler_options import reads_updated, with_defaults
from tests.memory.test_estimate import needs_h100

N, WIDTH = 64, 256
W = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((WIDTH,), jnp.float32)


def _loop(read, write=jax.lax.dynamic_update_index_in_dim):
    """A loop that writes row after row of an array, and what else it does with it."""

    def step(w, x):
        def body(i, carry):
            x, cache = carry
            cache = write(cache, jnp.tanh(w @ x), i, 0)
            return read(x, cache, i), cache

        return jax.lax.fori_loop(0, N, body, (x, jnp.zeros((N, WIDTH))))

    return step


def _attended(x, cache, i):
    scores = jnp.where(jnp.arange(N) <= i, cache @ x, -jnp.inf)
    return jax.nn.softmax(scores) @ cache


def _next_row(x, cache, i):
    return x + jax.lax.dynamic_index_in_dim(cache, (i + 1) % N, 0, keepdims=False)


@jax.jit
def _written_inside(cache, row, i, axis):
    return jax.lax.dynamic_update_index_in_dim(cache, row, i, 0)


def _scanned(w, x):
    def layer(x, w):
        return jnp.tanh(w @ x), None

    return jnp.sum(jax.lax.scan(layer, x, jnp.stack([w, w]))[0])


def _attending(w, x):
    """With a function that is called, which updates arrays of its own in a loop."""

    @jax.jit
    def blocks(x):
        rows = lambda i, out: jax.lax.dynamic_update_index_in_dim(out, x * i, i, 0)
        return jax.lax.fori_loop(0, 4, rows, jnp.zeros((4, WIDTH))).sum(0)

    layer = lambda x, w: (jnp.tanh(w @ blocks(x)), None)
    return jnp.sum(jax.lax.scan(layer, x, jnp.stack([w, w]))[0])


def _stacked_caches(w, x):
    def body(cache, i):
        cache = jax.lax.dynamic_update_index_in_dim(cache, jnp.tanh(w @ x), i, 0)
        return cache, cache

    return jax.lax.scan(body, jnp.zeros((N, WIDTH)), jnp.arange(N))


READING = {
    "attends to all rows": _loop(_attended),
    "reads the next row": _loop(_next_row),
    "sums what a function wrote": _loop(lambda x, c, i: c.sum(0), _written_inside),
    "stacks the arrays": _stacked_caches,
    "sets at a place": _loop(
        lambda x, c, i: c.sum(0), lambda c, row, i, axis: c.at[i].set(row)
    ),
}
WRITING = {
    "writes alone": _loop(lambda x, cache, i: x * 2),
    "layers": jax.grad(_scanned),
    "layers that call a loop of their own": _attending,
    "reads before it writes": _loop(
        lambda x, cache, i: x, lambda c, row, i, axis: c * 2 + row[None]
    ),
}


@pytest.mark.parametrize("name", READING)
def test_a_loop_that_reads_what_it_updated_has_its_zeros(name):
    closed = jax.make_jaxpr(READING[name])(W, X)
    assert reads_updated(closed)
    assert with_defaults({"a": 1}, closed) == {"a": 1}


@pytest.mark.parametrize("name", WRITING)
def test_others_need_none(name):
    closed = jax.make_jaxpr(WRITING[name])(W, X)
    assert not reads_updated(closed)
    assert with_defaults(None, closed) == {OPTION: True}
    assert with_defaults({OPTION: False}, closed) == {OPTION: False}


@needs_h100
@pytest.mark.parametrize("name", ["attends to all rows", "writes alone"])
def test_the_audit_finds_what_reads_rows_that_nothing_wrote(name):
    """XLA leaves the zeros out of both."""
    step = jax.jit((READING | WRITING)[name], compiler_options={OPTION: True})
    rules = {one.rule for one in jaxmem.audit(step, W, X, target="h100").findings}
    assert rules == ({"read_unwritten"} if name in READING else set())


@needs_h100
def test_a_scheduled_step_on_a_gpu_fills_nothing_and_the_plan_tells_so():
    def loss(w, x):
        layers = lambda x, w: (jnp.tanh(x @ w), None)
        return jnp.sum(jax.lax.scan(layers, x, w)[0] ** 2)

    w = jax.ShapeDtypeStruct((24, 1024, 1024), jnp.float32)
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    step = jaxmem.schedule(jax.grad(loss), target="h100", donate_argnums=())
    plan = step.plan(w, x, target="h100")
    assert any(OPTION in note for note in plan.plain.time.notes)
    assert not any(OPTION in note for note in plan.scheduled.time.notes)
    assert plan.scheduled.seconds < 0.97 * plan.plain.seconds
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes
    alone = jaxmem.estimate(step, w, x, target="h100")
    assert alone.seconds == plan.scheduled.seconds


@needs_h100
def test_a_step_with_a_cache_is_compiled_as_it_was():
    step = jaxmem.schedule(READING["attends to all rows"], target="h100")
    assert step.jit_options(W, X).compiler_options is None
    other = jaxmem.schedule(WRITING["layers"], target="tpu-v5e")
    assert other.jit_options(W, X).compiler_options is None
