"""Steps under jax's own debugging tools, and steps that print."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, PartitionSpec

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.ir.prints import prints_in, without_prints
from tests.memory.test_estimate import needs_h100

LAYERS, WIDTH, BATCH = 6, 32, 64
X = jnp.ones((BATCH, WIDTH))
ROOM = "200KiB"  # half of what the step takes
WAYS = {"none": {}, "target": {"target": "cpu"}, "budget": {"budget": ROOM}}


def weights():
    return jnp.ones((LAYERS, WIDTH, WIDTH)) / WIDTH


def step(w, x, tell=lambda loss: None):
    layer = lambda h, w: (jnp.tanh(jnp.sin(h @ w)), None)
    loss = lambda w: jnp.square(jax.lax.scan(layer, x, w)[0]).sum()
    value, grads = jax.value_and_grad(loss)(w)
    tell(value)
    return w - 0.1 * grads, value


def printing(w, x):
    return step(w, x, lambda loss: jax.debug.print("loss {loss:.3f}", loss=loss))


def scheduled(fn, way):
    how = {"donate_argnums": 0, "progress": False} | WAYS[way]
    return jaxmem.schedule(fn, **({"target": "cpu"} if way == "budget" else {}) | how)


def _same(found, want):
    for one, other in zip(found, want, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5)


@pytest.mark.parametrize("way", WAYS)
def test_leaks_are_looked_for_in_the_step_alone(way):
    want = step(weights(), X)
    with jax.checking_leaks():
        _same(scheduled(step, way)(weights(), X), want)


@pytest.mark.usefixtures("hidden_heap")
def test_a_leak_of_the_step_is_told():
    escaped = []
    with jax.checking_leaks(), pytest.raises(Exception, match="Leaked"):
        scheduled(lambda w, x: step(w, x, escaped.append), "none")(weights(), X)


@pytest.mark.parametrize("way", WAYS)
def test_without_jit_the_step_runs_as_it_was_given(way):
    """There is no search, and the step sees values."""
    seen = []
    want = step(weights(), X)
    with jax.disable_jit():
        fn = scheduled(lambda w, x: step(w, x, lambda x: seen.append(float(x))), way)
        _same(fn(weights(), X), want)
    assert seen == [pytest.approx(float(want[1]))]


@pytest.mark.slow
def test_without_jit_a_step_is_planned_and_measured_all_the_same():
    with jax.disable_jit():
        plan = scheduled(step, "target").plan(weights(), X)
        report = jaxmem.estimate(step, weights(), X, donate_argnums=0)
    assert plan.plain == report
    assert plan.fingerprint == scheduled(step, "none").plan(weights(), X).fingerprint


@pytest.mark.fast("none", "budget")
@pytest.mark.parametrize("way", WAYS)
def test_a_step_prints_as_often_as_it_did(way, capfd):
    want = step(weights(), X)
    _same(scheduled(printing, way)(weights(), X), want)
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["loss", f"{float(want[1]):.3f}"]


@pytest.mark.fast("cpu")
@pytest.mark.parametrize("target", ["cpu", pytest.param("h100", marks=needs_h100)])
def test_what_a_step_prints_is_left_out_of_what_is_measured(target):
    args = weights(), X
    silent = jaxmem.estimate(step, *args, target=target, donate_argnums=0)
    report = jaxmem.estimate(printing, *args, target=target, donate_argnums=0)
    assert report.peak_bytes == silent.peak_bytes
    assert any("jax.debug.print" in note for note in report.notes)
    assert not any("jax.debug.print" in note for note in silent.notes)


def _in_a_loop(x):
    def layer(h, _):
        jax.debug.print("{}", h[0], ordered=True)
        return h * 2.0, h

    return jax.lax.scan(layer, x, length=3)


def _in_a_branch(x):
    tell = lambda x: (jax.debug.callback(lambda x: None, x), x)[1]
    return jax.lax.cond(x[0] > 0, tell, jnp.negative, x)


def _in_a_shard_map(x):
    mesh = Mesh(np.array(jax.devices()), ("data",), axis_types=(AxisType.Auto,))
    spec = PartitionSpec("data")

    def shard(x):
        jax.debug.print("{}", x[0])
        return x / jax.lax.psum(x, "data")

    return jax.shard_map(shard, mesh=mesh, in_specs=spec, out_specs=spec)(x)


@pytest.mark.parametrize(
    "fn", [_in_a_loop, _in_a_branch, _in_a_shard_map, jax.checkpoint(_in_a_branch)]
)
def test_prints_are_found_wherever_they_are(fn):
    x = jnp.arange(8.0) + 1
    closed = jax.make_jaxpr(jax.jit(fn))(x)
    silent = without_prints(closed)
    assert prints_in(closed) == 1 and prints_in(silent) == 0
    assert not silent.effects
    _same(jaxprs.evaluate(silent, [x]), jax.tree.leaves(fn(x)))
