"""Where a report or a plan says that an array comes from: the user's line."""

import functools

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import _compat
from jaxmem._module_path import parse_op_name
from jaxmem.memory.buffers.hlo import Location
from jaxmem.memory.buffers.origin import Origin

S = jax.ShapeDtypeStruct
NODES, EDGES, WIDTH = 1024, 4096, 16


def aggregated(w, h, i, j):
    """A layer of a graph network: XLA makes the zeros of its sums itself."""
    return jax.nn.relu(jnp.zeros((NODES, WIDTH)).at[i].add((h @ w)[j]))


def step(ws, x, i, j):
    def loss(ws):
        h = x
        for w in ws:
            h = jax.checkpoint(aggregated)(w, h, i, j)
        return jnp.square(h).mean()

    value, grads = jax.value_and_grad(loss)(ws)
    return jax.tree.map(lambda w, g: w - g, ws, grads), value


ARGUMENTS = (
    [S((WIDTH, WIDTH), jnp.float32)] * 4,
    S((NODES, WIDTH), jnp.float32),
    *[S((EDGES,), jnp.int32)] * 2,
)


@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.slow
def test_zeros_that_the_compiler_makes_are_those_of_who_reads_them(target):
    report = jaxmem.estimate(step, *ARGUMENTS, target=target, donate_argnums=0)
    arrays = [h for h in report.at_peak if h.kind == "temp" and h.shape]
    assert any(h.operation == "scatter-add" for h in arrays)
    assert not any("call_exported" in h.operation for h in arrays)
    assert all("test_sources.py" in h.source for h in arrays)
    assert not any("(xla)" in h.group for h in arrays)


@pytest.mark.slow
def test_what_a_pass_writes_is_the_line_of_what_it_stands_for():
    """Products in tiles are of one of two kinds, which the pass chooses from."""
    x, w = S((512, 64), jnp.bfloat16), S((64, 2048), jnp.bfloat16)

    def loss(w, x):
        return jnp.square(jax.nn.gelu(x @ w)).astype(jnp.float32).sum()

    scheduled = jaxmem.schedule(
        lambda w, x: jax.value_and_grad(loss)(w, x),
        target="cpu",
        budget="4MiB",
        progress=False,
    )
    plan = scheduled.plan(w, x)
    assert plan.tiles or plan.residuals or plan.recomputed
    words = [*plan.notes, *(row.line for row in plan.tiles), str(plan)]
    assert not any("jaxmem/scheduling" in line for line in words)


def test_an_op_has_no_line_of_its_own():
    """Its equations have that of its caller; of its first one, where jax caches it."""
    eqns = jax.make_jaxpr(lambda x: jaxmem.ops.glu(x))(jnp.ones(22)).eqns
    assert not any("jaxmem/ops" in _compat.source_line(eqn) for eqn in eqns)


def test_what_no_function_computes_is_in_the_group_of_its_file():
    """Code of a script's top level, whose function Python calls `<module>`."""
    place = functools.partial(Location, "folder/train.py", 3)
    group = lambda name: Origin(parse_op_name(""), "add", place(name)).group
    assert group("<module>") == "train.py" and group("a.<locals>.b") == "a.b()"
