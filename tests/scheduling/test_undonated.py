"""A step whose arguments stay: its results need memory of their own from the start.

As long as an update waits its gradient can lie in that memory, so an update that is
done early frees nothing. Bytes are the compiler's, for the CPU.
"""

import jax
import jax.numpy as jnp
import optax
import pytest

from jaxmem import schedule
from tests.scheduling import problem
from tests.scheduling.problem import array, assert_close, bytes_of
from tests.scheduling.test_order import arguments, momentum

pytestmark = pytest.mark.usefixtures("standard_promotion")

LAYERS, WIDTH, ROWS = 6, 96, 24


def arguments_of(tx):
    f32 = jnp.float32
    layers = problem.stack(LAYERS, WIDTH, dtype=f32)
    params = {"layers": layers, "head": array(WIDTH, 3, seed=3, dtype=f32)}
    return params, tx.init(params), array(ROWS, WIDTH, seed=4, dtype=f32)


def peak(step, args, donate=()) -> int:
    """Arguments, results and temporaries of the compiled step."""
    fn = step if hasattr(step, "lower") else jax.jit(step, donate_argnums=donate)
    found = fn.lower(*args).compile().memory_analysis()
    both = found.argument_size_in_bytes + found.output_size_in_bytes
    return both + found.temp_size_in_bytes - found.alias_size_in_bytes


OPTIMIZERS = {
    "sgd": optax.sgd(0.1),
    "momentum": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(0.1),
    "clipped": optax.chain(optax.clip_by_global_norm(0.1), optax.adam(0.1)),
}


@pytest.mark.fast("sgd-()", "momentum-(1,)", "adam-()", "clipped-(1,)")
@pytest.mark.parametrize("donate", [(), (1,)], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_scanned_layers_take_no_more_than_jit(name, donate):
    step = problem.train_step(OPTIMIZERS[name])
    args = arguments_of(OPTIMIZERS[name])
    scheduled = schedule(step, donate_argnums=donate)
    assert peak(scheduled, args, donate) <= peak(step, args, donate)


@pytest.mark.parametrize("donate", [(), (0,), (1,)], ids=str)
def test_unrolled_layers_take_no_more_than_jit(donate):
    args = arguments(256)
    scheduled = schedule(momentum, donate_argnums=donate)
    assert peak(scheduled, args, donate) <= peak(momentum, args, donate)


def test_no_gradient_is_released_and_the_plan_says_why():
    tx = OPTIMIZERS["adam"]
    step, args = problem.train_step(tx), arguments_of(tx)
    plan = schedule(step, donate_argnums=()).plan(*args)
    assert plan.released_bytes == 0
    kept = [g for g in plan.gradients if not g.released]
    assert sum(g.bytes for g in kept) == bytes_of(args[0]["layers"])
    # w: new parameters and two moments, none of them in the place of an old one
    assert {g.why for g in kept if len(g.shape) == 3} == {
        "not donated: its update would write 648 KiB beside what is updated"
    }


def test_where_a_gradient_is_made_in_a_place_of_its_own_it_is_released():
    """The state donated and the parameters not: they are written anew either way."""
    tx = OPTIMIZERS["sgd"]
    step, args = problem.train_step(tx), arguments_of(tx)
    assert schedule(step, donate_argnums=0).plan(*args).released_bytes
    assert not schedule(step, donate_argnums=1).plan(*args).released_bytes


def test_inside_another_function_who_donates_is_not_known():
    """So all that may be is released, as that function may donate it."""
    tx = OPTIMIZERS["sgd"]
    step, args = problem.train_step(tx), arguments_of(tx)
    inner = schedule(step)
    outer = schedule(lambda *args: inner(*args), donate_argnums=0)
    want = jax.jit(step)(*args)
    assert_close(outer(*problem.copy(args)), want, rtol=64 * 2.0**-24)
    assert peak(outer, args, (0,)) < peak(step, args, (0,))
