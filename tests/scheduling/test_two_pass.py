"""clip="two_pass": the backward pass done once for a number, once to update."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import lax

from jaxmem import schedule
from jaxmem.ir import jaxprs
from tests.scheduling import problem
from tests.scheduling.problem import (
    D,
    array,
    assert_close,
    bytes_of,
    checked,
    copy,
    state_of,
    temp_bytes,
    train_step,
)
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_promotion")

LR, BOUND = 1e-2, 0.01
CLIPPED = optax.chain(optax.clip_by_global_norm(BOUND), optax.adam(LR))


def loops(fn, *args) -> int:
    """`while` loops of the compiled program."""
    return problem.compile_quickly(fn, *args).as_text().count(" while(")


def twice(step, *args, **options):
    return checked(step, *args, clip="two_pass", **options)


def arguments(tx, params=None, loss=problem.loss):
    params = problem.params() if params is None else params
    return state_of(tx, params, problem.inputs(), loss)


OPTIMIZERS = {
    "clip by global norm": CLIPPED,
    "clip by block rms": optax.chain(optax.clip_by_block_rms(BOUND), optax.adam(LR)),
    "lamb": optax.lamb(LR),
    "normalized": optax.chain(optax.normalize_by_update_norm(), optax.sgd(LR)),
}


@pytest.mark.parametrize("name", some_fast(OPTIMIZERS, "clip by global norm"))
def test_released(name):
    tx = OPTIMIZERS[name]
    args = arguments(tx)
    plan = twice(train_step(tx), *args)
    assert plan.kept_bytes == 0, problem.whys(plan)
    assert plan.released_bytes == bytes_of(args[0]["layers"])


def test_two_backward_loops():
    args = arguments(CLIPPED)
    step = train_step(CLIPPED)
    two = schedule(step, donate_argnums=(0, 1), clip="two_pass")
    assert (loops(step, *args), loops(two, *args)) == (2, 3)


def assert_one_pass_is_enough(step, *args):
    once, two = (
        schedule(step, donate_argnums=(0, 1), clip=clip).trace(*args).jaxpr
        for clip in (None, "two_pass")
    )
    assert str(once) == str(two)


def test_only_where_it_is_needed():
    tx = optax.adam(LR)
    args = problem.params(), tx.init(problem.params()), problem.inputs()
    assert_one_pass_is_enough(train_step(tx), *args)


@pytest.mark.slow
def test_remat():
    def loss(params, x):
        return problem.loss_with(jax.checkpoint(problem.layer), params, x)

    plan = twice(train_step(CLIPPED, loss), *arguments(CLIPPED, loss=loss))
    assert plan.kept_bytes == 0


@pytest.mark.slow
def test_several_scans():
    """The norm is over the gradients of both."""
    params = {"a": problem.stack(3), "b": problem.stack(seed=7)}

    def loss(params, x):
        return jnp.mean(
            problem.forward(problem.forward(x, params["a"]), params["b"]) ** 2
        )

    args = arguments(CLIPPED, params, loss)
    step = train_step(CLIPPED, loss)
    plan = twice(step, *args)
    assert plan.kept_bytes == 0
    assert plan.released_bytes == bytes_of(params)


@pytest.mark.slow
def test_parameters_used_in_two_scans():
    def loss(params, x):
        once = problem.forward(x, params["layers"])
        return jnp.mean((problem.forward(once, params["layers"]) @ params["head"]) ** 2)

    twice(train_step(CLIPPED, loss), *arguments(CLIPPED, loss=loss))


@pytest.mark.slow
def test_clipping_each_of_the_micro_batches():
    """A clipped step for each, in an outer scan."""

    def steps(params, state, xs):
        def one(carry, x):
            params, state, value = train_step(CLIPPED)(*carry, x)
            return (params, state), value

        (params, state), values = lax.scan(one, (params, state), xs)
        return params, state, values

    params = problem.params()
    xs = array(3, problem.BATCH, D, seed=4)
    plan = twice(steps, params, CLIPPED.init(params), xs)
    assert plan.kept_bytes == 0


def test_clipping_the_sum_of_micro_batches():
    """The accumulator is there when the norm is asked for: one pass is enough."""

    def step(params, state, xs):
        def add(total, x):
            grads = jax.grad(problem.loss)(params, x)
            return jax.tree.map(jnp.add, total, grads), None

        grads, _ = lax.scan(add, jax.tree.map(jnp.zeros_like, params), xs)
        updates, state = CLIPPED.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    params = problem.params()
    args = params, CLIPPED.init(params), array(3, problem.BATCH, D, seed=4)
    assert twice(step, *args).kept_bytes == 0
    assert_one_pass_is_enough(step, *args)


def test_the_norm_is_reported_too():
    def step(params, state, x):
        grads = jax.grad(problem.loss)(params, x)
        updates, state = CLIPPED.update(grads, state, params)
        return optax.apply_updates(params, updates), state, optax.tree.norm(grads)

    args = arguments(CLIPPED)
    plan = twice(step, *args)
    assert plan.kept_bytes == 0
    assert problem.compiled(step)(*args)[2] > 2 * BOUND  # clipped, in all these tests


def test_a_step_that_is_skipped_where_a_gradient_is_not_finite():
    """The choice is a number made of all gradients, used elementwise."""
    tx = optax.sgd(LR, momentum=0.9)

    def step(params, state, x):
        grads = jax.grad(problem.loss)(params, x)
        good = jnp.isfinite(optax.tree.norm(grads))
        updates, after = tx.update(grads, state, params)
        pick = lambda new, old: jax.tree.map(
            lambda a, b: jnp.where(good, a, b), new, old
        )
        return pick(optax.apply_updates(params, updates), params), pick(after, state)

    args = arguments(tx)
    plan = twice(step, *args)
    assert plan.kept_bytes == 0
    bad = *args[:2], args[2].at[0].set(jnp.nan)
    scheduled = schedule(step, donate_argnums=(0, 1), clip="two_pass")
    assert_close(problem.compiled(scheduled)(*copy(bad)), bad[:2])


def test_memory():
    """A layer's gradients at a time, both times."""
    params = {"layers": problem.stack(12, 64), "head": array(64, problem.OUT)}
    tx = optax.chain(optax.clip_by_global_norm(BOUND), optax.sgd(LR))

    def loss(params, x):
        return problem.loss_with(jax.checkpoint(problem.layer), params, x)

    args = params, tx.init(params), array(problem.BATCH, 64)
    step = train_step(tx, loss)
    two = schedule(step, donate_argnums=(0, 1), clip="two_pass")
    stacked = bytes_of(params["layers"])
    assert temp_bytes(step, *args) - temp_bytes(two, *args) > stacked * 8 // 12


def test_gradients_that_are_returned_are_kept():
    """A second pass would not release them."""

    def step(params, state, x):
        grads = jax.grad(problem.loss)(params, x)
        updates, state = CLIPPED.update(grads, state, params)
        return optax.apply_updates(params, updates), state, grads

    args = arguments(CLIPPED)
    plan = twice(step, *args)
    assert plan.kept_bytes == bytes_of(args[0]["layers"])
    two = schedule(step, donate_argnums=(0, 1), clip="two_pass").trace(*args).jaxpr
    back = [
        e
        for e in jaxprs.walk(two)
        if e.primitive.name == "scan" and e.params["reverse"]
    ]
    assert len(back) == 1
