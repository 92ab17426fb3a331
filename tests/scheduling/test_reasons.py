"""What stands in the way is said: shardings of a jitted step, updates that wait."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import schedule
from tests.scheduling import problem
from tests.scheduling.problem import assert_close, bytes_of, copy
from tests.scheduling.test_order import LAYERS, arguments, loss, matrices

RTOL = 64 * 2.0**-24  # float32: sums of 5 to 16 terms, forward and back
PARAMS, X = problem.params(jnp.float32), problem.inputs(jnp.float32)


def sgd(params, x):
    value, grads = jax.value_and_grad(problem.loss)(params, x)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


# -- a step jitted with shardings is scheduled as any other


def shardings():
    auto = (jax.sharding.AxisType.Auto,)
    mesh = jax.make_mesh((4,), ("x",), axis_types=auto, devices=jax.devices()[:4])
    spread = lambda x: PartitionSpec(*[None] * (x.ndim - 1), "x")
    weights = lambda x: NamedSharding(mesh, spread(x) if x.ndim == 3 else spec)
    spec = PartitionSpec()
    return jax.tree.map(weights, PARAMS), NamedSharding(mesh, spec)


def kinds():
    params, whole = shardings()
    return {
        "in": {"in_shardings": (params, whole)},
        "out": {"out_shardings": (params, whole)},
        "both": {"in_shardings": (params, whole), "out_shardings": (params, whole)},
    }


@pytest.mark.fast("both")
@pytest.mark.parametrize("kind", ["in", "out", "both"])
def test_a_step_jitted_with_shardings_is_scheduled(kind):
    step = jax.jit(sgd, donate_argnums=0, **kinds()[kind])
    params, x = jax.device_put((PARAMS, X), shardings())
    want = step(copy(params), x)
    scheduled = schedule(step)
    # on each of four devices
    own = bytes_of(PARAMS["layers"]) // 4
    assert scheduled.plan(params, x).released_bytes == own
    got = scheduled(copy(params), x)
    assert_close(got, want, RTOL)
    for new, as_was in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        if kind != "in":  # else the compiler is free
            assert new.sharding.is_equivalent_to(as_was.sharding, new.ndim)


# -- what cannot be done, and why


def clipped(params, state, x):
    grads = jax.grad(loss)(params, x)
    grads, _ = optax.clip_by_global_norm(1.0).update(grads, optax.EmptyState())
    return [p - 0.1 * g for p, g in zip(params, grads, strict=True)], state


def test_an_unrolled_step_that_clips_says_what_its_updates_wait_for():
    with jax.numpy_dtype_promotion("standard"):
        plan = schedule(clipped, donate_argnums=(0, 1)).plan(*arguments())
    (waits,) = (note for note in plan.notes if "wait for" in note)
    assert waits.startswith(f"{LAYERS}.00 MiB of gradients in {LAYERS} arrays wait for")
    assert "clip_by_layer_norm" in waits
    assert "two_pass" in waits
    assert waits in str(plan)


def test_gradients_that_are_taken_at_once():
    def step(params, x):
        grads = jax.grad(loss)(params, x)
        flat = jnp.concatenate([g.ravel() for g in grads])
        return jnp.split(0.1 * flat, LAYERS)

    plan = schedule(step, donate_argnums=0).plan(matrices(), arguments()[2])
    assert any("`concatenate`" in note and "at once" in note for note in plan.notes)


def test_updates_that_do_not_wait_are_not_named():
    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return [p - 0.1 * g for p, g in zip(params, grads, strict=True)]

    args = matrices(), arguments()[2]
    assert schedule(step, donate_argnums=0).plan(*args).notes == ()


def test_a_step_without_a_gradient():
    plan = schedule(lambda x: 2 * x, donate_argnums=0).plan(np.ones(3))
    assert any("it has no backward pass" in note for note in plan.notes)


def test_a_step_in_which_nothing_is_done():
    def step(params, x):
        return jax.tree.map(jnp.add, params, jax.grad(loss)(params, x))

    plan = schedule(step, donate_argnums=0).plan(matrices(8), np.ones((2, 8), "f"))
    assert any(note.startswith("nothing is changed") for note in plan.notes)


def test_layers_inside_a_branch():
    """A `cond` round the whole step is not opened: it is named, with its line."""

    def step(params, x):
        new = lambda: sgd(params, x)[0]
        return jax.lax.cond(x[0, 0] > 0, new, lambda: params)

    plan = schedule(step, donate_argnums=0).plan(PARAMS, X)
    (note,) = (note for note in plan.notes if "`cond`" in note)
    assert "test_reasons.py" in note
    assert "is not changed" in note


def test_effects_in_a_scan():
    def noisy(x, w):
        jax.debug.callback(lambda _: None, x)
        return problem.layer(x, w)

    def step(params, x):
        grads = jax.grad(lambda p: problem.loss_with(noisy, p, x))(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)

    plan = schedule(step, donate_argnums=0).plan(PARAMS, X)
    assert any("has side effects" in note for note in plan.notes)
