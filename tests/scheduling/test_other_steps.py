"""Steps of other kinds than layers and a loss, within a budget: they train alike."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.scheduling import BudgetError

pytestmark = pytest.mark.usefixtures("standard_jax")

STEPS, EPS = 3, 2.0**-23
ROWS, WIDTH, DRAWS, NOISE = 512, 32, 16, 8


def drawn(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


# -- a variational fit


def negative_elbo(p, noise, x, y):
    deviation = jax.nn.softplus(p["rho"])
    weights = p["mu"] + deviation * noise
    likelihood = lambda w: jnp.sum(jax.nn.log_sigmoid((2 * y - 1) * (x @ w)))
    divergence = deviation**2 + p["mu"] ** 2 - 1 - 2 * jnp.log(deviation)
    return divergence.sum() / 2 - jax.vmap(likelihood)(weights).mean()


FIT = optax.adam(1e-2)


def fit_step(state, data):
    p, moments, key = state
    noise = jax.random.normal(jax.random.fold_in(key, 0), (DRAWS, WIDTH))
    value, gradient = jax.value_and_grad(negative_elbo)(p, noise, *data)
    updates, moments = FIT.update(gradient, moments, p)
    return (optax.apply_updates(p, updates), moments, key), value


def fit():
    p = {"mu": jnp.zeros(WIDTH), "rho": jnp.zeros(WIDTH)}
    data = drawn(ROWS, WIDTH), (drawn(ROWS, seed=1) > 0).astype(jnp.float32)
    return fit_step, (p, FIT.init(p), jax.random.key(0)), data


# -- two nets against each other


def generated(p, z):
    """Two layers with norms over the batch, and their statistics."""
    h = z @ p["first"]
    mean, variance = h.mean(0), h.var(0)
    h = jax.nn.relu((h - mean) * jax.lax.rsqrt(variance + 1e-5) * p["scale"])
    return jnp.tanh(h @ p["last"]), {"mean": mean, "variance": variance}


def judged(p, x):
    return (jax.nn.leaky_relu(jax.nn.leaky_relu(x @ p["first"]) @ p["last"])).sum(-1)


RIVALS = optax.adam(1e-3, b1=0.5)


def judge_loss(p, real, fake):
    """With a penalty on the gradient at real examples (R1)."""
    slope = jax.grad(lambda x: judged(p, x).sum())(real)
    both = jax.nn.softplus(-judged(p, real)) + jax.nn.softplus(judged(p, fake))
    return both.mean() + 5 * (slope**2).sum(-1).mean()


def rivals_step(state, real):
    z = jax.random.normal(state["key"], (len(real), NOISE))
    fake = jax.lax.stop_gradient(generated(state["maker"], z)[0])
    told, gradient = jax.value_and_grad(judge_loss)(state["judge"], real, fake)
    updates, judges = RIVALS.update(gradient, state["judges"])
    judge = optax.apply_updates(state["judge"], updates)

    def loss(p):
        fake, statistics = generated(p, z)
        return jax.nn.softplus(-judged(judge, fake)).mean(), statistics

    (fooled, new), gradient = jax.value_and_grad(loss, has_aux=True)(state["maker"])
    updates, makers = RIVALS.update(gradient, state["makers"])
    maker = optax.apply_updates(state["maker"], updates)
    mix = lambda share: lambda old, new: share * old + (1 - share) * new
    return {
        "judge": judge,
        "judges": judges,
        "maker": maker,
        "makers": makers,
        "average": jax.tree.map(mix(0.99), state["average"], maker),
        "statistics": jax.tree.map(mix(0.9), state["statistics"], new),
        "key": state["key"],
    }, (told, fooled)


def rivals():
    first = drawn(NOISE, WIDTH) / NOISE
    last = drawn(WIDTH, WIDTH, seed=1) / WIDTH
    maker = {"first": first, "scale": jnp.ones(WIDTH), "last": last}
    judge = {"first": last.T, "last": drawn(WIDTH, 4, seed=2) / WIDTH}
    state = {
        "judge": judge,
        "judges": RIVALS.init(judge),
        "maker": maker,
        "makers": RIVALS.init(maker),
        "average": jax.tree.map(jnp.copy, maker),
        "statistics": {"mean": jnp.zeros(WIDTH), "variance": jnp.ones(WIDTH)},
        "key": jax.random.key(0),
    }
    return rivals_step, state, drawn(ROWS, WIDTH, seed=3)


def copied(state):
    return jax.tree.map(jnp.copy, state)


def trained(step, state, batch):
    told = []
    for _ in range(STEPS):
        state, value = step(state, batch)
        told.append(jax.tree.map(float, value))
    floats = [x for x in jax.tree.leaves(state) if x.dtype == jnp.float32]
    return [*floats, *map(np.asarray, told)]


@pytest.mark.slow
@pytest.mark.parametrize("make", [fit, rivals])
def test_a_step_trains_alike_within_a_budget(make):
    step, state, batch = make()
    how = {"target": "cpu", "donate_argnums": 0, "progress": False}
    with pytest.raises(BudgetError) as error:
        jaxmem.schedule(step, 1, **how).plan(state, batch)
    scheduled = jaxmem.schedule(step, error.value.least, **how)
    got = trained(scheduled, copied(state), batch)
    want = trained(jax.jit(step), state, batch)
    for g, w in zip(got, want, strict=True):
        # a sum over all rows in another order; Adam divides by what it is of
        np.testing.assert_allclose(g, w, rtol=0, atol=ROWS * EPS * np.abs(w).max())
