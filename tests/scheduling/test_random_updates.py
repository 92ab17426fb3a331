"""Updates drawn at random: what is moved into the backward scan changes nothing.

Each is a small graph of operations on the gradient, the parameters and some state, with
the layers along any axis; sizes are small: equal axes, and axes of size 1, meet.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem import schedule
from tests.scheduling.problem import array, checked

pytestmark = pytest.mark.usefixtures("x64")


def operations(axis):
    """Functions of two arrays that have the layers along `axis`."""
    inside = (axis + 1) % 3
    others = tuple(i for i in range(3) if i != axis)
    front = functools.partial(jnp.moveaxis, source=axis, destination=0)
    back = functools.partial(jnp.moveaxis, source=0, destination=axis)
    norm = lambda a: jnp.sqrt(jnp.sum(a**2, others, keepdims=True))
    by_layer = [
        lambda a, b: a + b,
        lambda a, b: a * b,
        lambda a, b: 0.9 * a - 0.1 * b,
        lambda a, b: jnp.tanh(a),
        lambda a, b: jnp.where(b > 0, a, b),
        lambda a, b: a / (1 + norm(b)),
        lambda a, b: back(front(a) @ front(b).mT),
        lambda a, b: a + jnp.cumsum(b, inside),
        lambda a, b: a + jnp.max(b, inside, keepdims=True),
        lambda a, b: a + jnp.flip(b, inside),
        lambda a, b: a.astype(jnp.float32).astype(jnp.float64),
    ]
    over_layers = [
        lambda a, b: a * jnp.sum(b),
        lambda a, b: a + jnp.sum(b, axis, keepdims=True),
        lambda a, b: jnp.roll(a, 1, axis) + b,
    ]
    return [*by_layer * 3, *over_layers]


def drawn_step(seed):
    """(step, its arguments): new parameters and state, and sometimes a report."""
    rng = np.random.default_rng(seed)
    axis, layers, width = rng.integers(3), rng.integers(1, 5), rng.integers(2, 5)
    shape = np.insert([width, width], axis, layers)
    rule = operations(axis)
    picks = rng.integers(0, 2**16, (rng.integers(4, 12), 3))
    news = rng.integers(0, 2**16, 3)
    remat, report = rng.random(2) < 0.4

    def loss(params, x):
        body = lambda x, w: (jnp.tanh(x @ w) + 0.5 * x, None)
        body = jax.checkpoint(body) if remat else body
        return jnp.mean(lax.scan(body, x, jnp.moveaxis(params, axis, 0))[0] ** 2)

    def step(params, state, x):
        pool = [jax.grad(loss)(params, x), params, *state]
        for op, a, b in picks:
            pool.append(
                rule[op % len(rule)](pool[a % len(pool)], pool[b % len(pool)]) / 2
            )
        late = pool[len(pool) // 2 :]
        new, *state = (late[i % len(late)] for i in news)
        return new, state, (jnp.sum(pool[-1]), params) if report else None

    state = [array(*shape, seed=seed + i, scale=0.4) for i in range(2)]
    params = array(*shape, seed=seed + 2, scale=0.4)
    return step, (params, state, array(3, width, seed=seed + 3))


SEEDS = range(8)


@pytest.mark.fast("0", "3", "5", "6")
@pytest.mark.parametrize("seed", SEEDS)
def test_random_update(seed):
    step, args = drawn_step(seed)
    clip = "two_pass" if seed % 2 else None
    # a dozen operations on sums of at most 64, in float64
    checked(step, *args, donate=(0, 1) if seed % 3 else (), clip=clip, rtol=1e-10)


def test_many_of_them_are_released():
    """Else the results would say nothing."""
    plans = []
    for seed in SEEDS:
        step, args = drawn_step(seed)
        plans.append(schedule(step, donate_argnums=(0, 1)).plan(*args))
    assert sum(plan.released_bytes > 0 for plan in plans) >= len(SEEDS) // 2
