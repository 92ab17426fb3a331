"""The host's slices in loops: the same values, at indices that are hidden."""

import chex
import jax
import jax.numpy as jnp
import pytest
from jax import lax

from jaxmem.ir import host_slices, jaxprs
from jaxmem.ir.flatten import flatten
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.scans import is_on_host

HOST, DEVICE = jax.memory.Space.Host, jax.memory.Space.Device
N, WIDTH = 6, 8


@pytest.fixture(autouse=True)
def affected(monkeypatch):
    monkeypatch.setattr(host_slices, "AFFECTED", True)


def here(x):
    return jax.device_put(x, DEVICE)


def away(x):
    return jax.device_put(x, HOST)


def read(stack, x, unroll=1):
    """Backwards, from the host."""

    def body(carry, row):
        carry = jnp.sin(carry) + here(row)
        return carry, 2 * carry

    return lax.scan(body, x, stack, reverse=True, unroll=unroll)


def written(stack, x):
    """Backwards, to the host, in the middle of what stays here."""

    def body(carry, row):
        carry = jnp.sin(carry) + here(row)
        return carry, (carry, away(jnp.cos(carry)), 3 * carry)

    end, (first, second, third) = lax.scan(body, x, stack, reverse=True)
    return end, first, here(second), third


def in_micro_batches(stack, x):
    step = lambda carry, _: (read(stack, carry)[0], None)
    return lax.scan(step, x, length=2)[0]


def chunks(stack, x):
    """Rows two at a time."""

    def body(i, carry):
        rows = lax.dynamic_slice_in_dim(stack, 2 * i, 2, 0)
        return jnp.sin(carry) + here(rows).sum(0)

    return lax.fori_loop(0, N // 2, body, x)


def until(stack, x):
    """A loop of no known length, which changes the host's array."""

    def body(carry):
        i, stack, x = carry
        row = lax.dynamic_slice_in_dim(stack, N - 1 - i, 1, 0)
        x = jnp.sin(x) + here(row)[0]
        return i + 1, lax.dynamic_update_slice_in_dim(stack, away(x[None]), i, 0), x

    goes_on = lambda carry: (carry[0] < N) & (carry[2].sum() < 1e3)
    _, stack, x = lax.while_loop(goes_on, body, (0, stack, x))
    return here(stack), x


def in_a_branch(stack, x):
    return lax.cond(x[0] > 0, read, lambda stack, x: read(stack, -x), stack, x)


def called(stack, x):
    return jax.jit(read)(stack, jax.checkpoint(in_micro_batches)(stack, x))


STEPS = {
    step.__name__: step
    for step in (read, written, in_micro_batches, chunks, until, in_a_branch, called)
} | {"unrolled": lambda stack, x: read(stack, x, unroll=3)}


def arguments():
    r = jax.random.normal(jax.random.key(0), (N + 1, WIDTH))
    return away(r[:N]), r[N]


def slices(body, loops=0):
    """(slice of the host's in a loop, the graph of that loop) of a jaxpr."""
    graph = JaxprGraph(flatten(body) if not loops else body)
    for eqn in graph.eqns:
        if loops and host_slices._is_slice(eqn):
            yield eqn, graph
        inner = loops + (eqn.primitive.name in ("scan", "while"))
        for one in jaxprs.bodies(eqn):
            yield from slices(one, inner)


def is_hidden(eqn, graph):
    """Whether the platform chooses between the index and its sum with a zero."""
    at = [v for v in eqn.invars if jaxprs.is_var(v) and not v.aval.shape]
    makers = [graph.eqns[i].primitive.name for i in graph.cone(at)]
    return "cond" in makers


@pytest.mark.parametrize("name", STEPS)
def test_the_same_values_at_hidden_indices(name):
    step, args = STEPS[name], arguments()
    before = jax.make_jaxpr(step)(*args)
    after = host_slices.with_hidden_indices(before)
    assert after is not before
    assert not any(map(host_slices.walks_back, jaxprs.walk(after)))
    found = list(slices(after))
    assert found and all(is_hidden(*one) for one in found)
    assert not any(is_hidden(*one) for one in slices(before))
    run = lambda closed: jax.jit(lambda *args: jaxprs.evaluate(closed, args))(*args)
    chex.assert_trees_all_equal(run(after), jax.tree.leaves(jax.jit(step)(*args)))


def test_it_is_hidden_on_gpus_alone():
    closed = host_slices.with_hidden_indices(jax.make_jaxpr(read)(*arguments()))
    run = jax.jit(lambda *args: jaxprs.evaluate(closed, args)).trace(*arguments())
    text = {p: run.lower(lowering_platforms=(p,)).as_text() for p in ("cuda", "tpu")}
    # of both a step of the index; of a GPU its sum with the zero besides
    sums = {p: t.count("stablehlo.add") for p, t in text.items()}
    assert sums["cuda"] == sums["tpu"] + 1


def test_in_shard_map():
    mesh = jax.make_mesh((4,), ("data",), (jax.sharding.AxisType.Auto,))
    spec = jax.P(None, "data")

    def step(stack, x):
        run = lambda stack, x: written(away(stack), x)
        specs = {"in_specs": (spec, jax.P("data")), "mesh": mesh}
        out = (jax.P("data"), spec, spec, spec)
        return jax.shard_map(run, **specs, out_specs=out)(stack, x)

    r = jax.random.normal(jax.random.key(0), (N + 1, WIDTH))
    args = r[:N], r[N]
    before = jax.make_jaxpr(step)(*args)
    after = host_slices.with_hidden_indices(before)
    assert not any(map(host_slices.walks_back, jaxprs.walk(after)))
    got = jax.jit(lambda *args: jaxprs.evaluate(after, args))(*args)
    chex.assert_trees_all_equal(got, jax.tree.leaves(jax.jit(step)(*args)))


def forwards(stack, x):
    """XLA knows the index: it is the loop's counter."""
    return lax.scan(lambda carry, row: (jnp.sin(carry) + here(row), None), x, stack)


@pytest.mark.parametrize("of_old", [False, True])
def test_what_is_right_stays(of_old, monkeypatch):
    monkeypatch.setattr(host_slices, "AFFECTED", of_old)
    step = forwards if of_old else read
    closed = jax.make_jaxpr(step)(*arguments())
    assert host_slices.with_hidden_indices(closed) is closed
    on_device = jax.make_jaxpr(read)(*map(here, arguments()))
    assert not any(is_on_host(v) for e in on_device.eqns for v in e.invars[1:2])


def test_rows_of_a_table_are_found_by_a_hidden_index(monkeypatch):
    """Those of an optimizer's state: its loop does not need `schedule`."""
    from jaxmem.ir.row_chunks import Chunks, by_rows

    def update(stack, x):
        rule = lambda lead, carried, read: away(here(carried) + read)
        return by_rows(rule, Chunks(1, 32), stack, x)

    x = jnp.arange(96.0 * 3).reshape(96, 3)
    for of_old in (True, False):
        monkeypatch.setattr(host_slices, "AFFECTED", of_old)
        # a function that jax has not traced before
        found = list(slices(jax.make_jaxpr(lambda *a: update(*a))(away(x), 2 * x)))
        assert [is_hidden(*one) for one in found] == [of_old, of_old]
    chex.assert_trees_all_equal(here(jax.jit(update)(away(x), 2 * x)), 3 * x)
