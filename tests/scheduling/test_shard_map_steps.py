"""A step whose outermost function is `shard_map`: all is done to one device's part."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxmem
from jaxmem import schedule
from jaxmem.scheduling import Plan, predict
from tests.scheduling import problem
from tests.scheduling.problem import array, assert_close, bytes_of, copy
from tests.sets import some_fast

LR, DEVICES = 0.1, 4
RTOL = 64 * 2.0**-24  # float32: sums of 5 to 16 terms, forward and back
PARAMS = problem.params(jnp.float32)
X = array(4 * DEVICES, problem.D, seed=4, dtype=jnp.float32)
REPLICATED, ROWS = PartitionSpec(), PartitionSpec("x")


def mesh():
    kind = (jax.sharding.AxisType.Auto,)
    devices = jax.devices()[:DEVICES]
    return jax.make_mesh((DEVICES,), ("x",), axis_types=kind, devices=devices)


def shards(params, x, loss=problem.loss):
    value, grads = jax.value_and_grad(loss)(params, x)
    grads = jax.lax.pmean(grads, "x")
    new = jax.tree.map(lambda p, g: p - LR * g, params, grads)
    return new, jax.lax.pmean(value, "x")


def unrolled_loss(params, x):
    for i in range(len(params["layers"]["b"])):
        x, _ = problem.layer(x, jax.tree.map(lambda w, i=i: w[i], params["layers"]))
    return jnp.mean((x @ params["head"]) ** 2)


def mapped(fn=shards, check_vma=False):
    return jax.shard_map(
        fn,
        mesh=mesh(),
        in_specs=(REPLICATED, ROWS),
        out_specs=(REPLICATED, REPLICATED),
        check_vma=check_vma,
    )


def arguments():
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh(), spec))
    return put(PARAMS, REPLICATED), put(X, ROWS)


FORMS = {
    "shard_map": mapped,
    "checked": lambda: mapped(check_vma=True),
    "jitted": lambda: jax.jit(mapped()),
    "jitted, donating": lambda: jax.jit(mapped(), donate_argnums=0),
    "in a function": lambda: lambda *args: mapped()(*args),
    "unrolled": lambda: mapped(functools.partial(shards, loss=unrolled_loss)),
}


@pytest.mark.fast("checked", "jitted, donating", "unrolled")
@pytest.mark.parametrize("form", FORMS)
def test_plan_and_call(form):
    """With donation and without any, which once failed at the call."""
    step = FORMS[form]()
    given = arguments()
    want = jax.jit(step)(*arguments())
    plan = schedule(step, donate_argnums=0).plan(*given)
    assert isinstance(plan, Plan)
    if form not in ("unrolled", "checked"):  # checked: JAX itself sums in the loop
        assert plan.released_bytes == bytes_of(PARAMS["layers"])
    assert_close(schedule(step, donate_argnums=())(*given), want, RTOL)
    assert_close(schedule(step, donate_argnums=0)(*copy(given)), want, RTOL)


def test_nothing_named():
    given, want = arguments(), jax.jit(mapped())(*arguments())
    with pytest.warns(UserWarning, match="no argument is donated"):
        assert_close(schedule(mapped())(*given), want, RTOL)


def deep(rows=64, layers=8):
    """Activations that are more than the parameters."""
    params = {"layers": problem.stack(layers, dtype=jnp.float32)}
    params["head"] = PARAMS["head"]
    x = array(rows * DEVICES, problem.D, seed=4, dtype=jnp.float32)
    put = lambda tree, spec: jax.device_put(tree, NamedSharding(mesh(), spec))
    return put(params, REPLICATED), put(x, ROWS)


@pytest.mark.parametrize("loss", some_fast([problem.loss, unrolled_loss], problem.loss))
def test_a_target(loss):
    """What its compiler says of one device decides."""
    step, args = mapped(functools.partial(shards, loss=loss)), deep()
    scheduled = schedule(step, donate_argnums=0, target="cpu")
    plan = scheduled.plan(*args)
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes
    assert_close(scheduled(*copy(args)), jax.jit(step)(*args), RTOL)


@pytest.mark.slow
def test_a_budget():
    step, args = mapped(), deep()
    least = schedule(step, donate_argnums=0, target="cpu").plan(*args).scheduled
    room = least.peak_bytes
    tight = schedule(step, room * 9 // 10, donate_argnums=0, target="cpu")
    plan = tight.plan(*args)
    assert plan.scheduled.peak_bytes <= room * 9 // 10 < room
    assert plan.recomputed
    assert_close(tight(*copy(args)), jax.jit(step)(*args), RTOL)


def test_predict():
    """Of one device's part: all four together have twice what it may be off by."""
    args = deep()
    found = predict(mapped(), *args, donate_argnums=0)
    compiled = jaxmem.estimate(mapped(), *args, target="cpu", donate_argnums=0)
    assert 0.5 * compiled.peak_bytes < found.peak_bytes < 2 * compiled.peak_bytes
