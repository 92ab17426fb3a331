"""Micro-batches of several devices in GaLore's subspace, and in moments of 8 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.optim import LowBit, accumulate_step, adama, apply_step, galore
from tests.optim.reference import adama_tree
from tests.optim.test_distributed import P, mapped, mesh_of

DEVICES, N, STEPS, EPS = 8, 2, 4, 2.0**-23
PARAMS = {"w": jnp.ones((8, 64)), "b": jnp.ones(64)}


def gradients(seed=0):
    """[steps, devices x n, ...], those of a device next to each other."""
    r = np.random.default_rng(seed)
    draw = lambda p: 0.3 + r.standard_normal((STEPS, DEVICES * N, *p.shape))
    return jax.tree.map(lambda p: jnp.asarray(draw(p), jnp.float32), PARAMS)


def over_devices(grads):
    """The mean of each micro-batch over the devices: [steps, n, ...]."""
    split = lambda g: g.reshape(STEPS, DEVICES, N, *g.shape[2:]).mean(1)
    return jax.tree.map(split, grads)


def turned(grads):
    """By how much rounding may turn the singular vectors of the first micro-batches."""
    first = np.float64(grads["w"][:, 0])
    values = np.linalg.svd(first, compute_uv=False)
    return EPS * (values[:, 0] / (-np.diff(values)).min(1)).max()


@jax.jit
def on_one_device(grads):
    tx = galore(1e-2, **GALORE, micro_batches=N)

    def step(carry, grads):
        params, state = carry
        for i in range(N):
            one = jax.tree.map(lambda g: g[i], grads)  # noqa: B023
            state = accumulate_step(tx, one, state, params, micro_batches=N)
        updates, state = apply_step(tx, state, params)
        return (optax.apply_updates(params, updates), state), None

    return jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), grads)[0]


GALORE = {"rank": 4, "gap": 2, "subspace": "svd", "projected": "w"}


@pytest.mark.parametrize("check_vma", [True, False])
def test_galore_is_that_of_the_mean_over_devices(check_vma):
    """The projectors too, which are those of the first micro-batch of all devices."""
    grads = gradients()
    tx = galore(1e-2, **GALORE, axis_name="data")
    got, state = mapped(tx, mesh_of(), PARAMS, grads, check_vma=check_vma)
    means = over_devices(grads)
    want, one = on_one_device(means)
    # sums of N gradients are taken in another order, and vectors turn by it
    rtol = 2 * STEPS * N * turned(means)
    for k in PARAMS:
        moved = np.abs(np.float64(want[k]) - 1).max()
        np.testing.assert_allclose(got[k], want[k], atol=rtol * moved + STEPS * EPS)
    left, other = (s[0].galore.projectors["w"].left for s in (state, one))
    np.testing.assert_allclose(left, other, atol=rtol)
    assert [int(x) for x in state[0][:3]] == [STEPS, 0, N]


def test_galore_projects_what_devices_keep():
    """Of the first micro-batches only the last device's counts; the rest are NaN."""
    grads = gradients()
    keeps = np.ones((STEPS, DEVICES, N), bool)
    keeps[:, :-1, 0] = False
    kept = keeps.reshape(STEPS, -1)
    hole = lambda g: jnp.where(
        kept.reshape(*kept.shape, *[1] * (g.ndim - 2)), g, jnp.nan
    )
    tx = galore(1e-2, **GALORE, axis_name="data")
    weights = jnp.full(kept.shape, 1 / N, jnp.float32)
    holes = jax.tree.map(hole, grads)
    got, _ = mapped(tx, mesh_of(), PARAMS, holes, weights, jnp.asarray(kept))
    zeros = jax.tree.map(lambda g: jnp.nan_to_num(g, nan=0.0), holes)
    want, _ = on_one_device(over_devices(zeros))
    rtol = 2 * STEPS * N * turned(over_devices(zeros))
    for k in PARAMS:
        moved = np.abs(np.float64(want[k]) - 1).max()
        np.testing.assert_allclose(got[k], want[k], atol=rtol * moved + STEPS * EPS)


def test_moments_in_codes_are_rounded_less_than_on_one_device():
    """Each device rounds N times a step and their sum once; one device 8 N times."""
    grads = gradients()
    how = LowBit(8, least_size=0)
    tx = adama(1e-2, axis_name="data", bits=how)
    got, state = mapped(tx, mesh_of(), PARAMS, grads)
    want, *_ = adama_tree(PARAMS, grads, lr=1e-2)
    one = adama(1e-2, bits=how, micro_batches=DEVICES * N)
    alone, _ = plain_steps(one, grads)
    error = lambda tree: max(np.abs(np.float64(tree[k]) - want[k]).max() for k in want)
    moved = max(np.abs(want[k] - 1).max() for k in want)
    assert 0 < error(got) <= error(alone) <= 0.1 * moved
    assert all(x.dtype in ("int8", "uint8") for x in codes(state))
    assert [int(x) for x in state[0][:3]] == [STEPS, 0, N]


def codes(state):
    moments = jax.tree.leaves(state[0][3:], is_leaf=lambda x: hasattr(x, "codes"))
    return [x.codes for x in moments]


@functools.partial(jax.jit, static_argnums=0)
def plain_steps(tx, grads):
    flat = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads)

    def step(carry, g):
        updates, state = tx.update(g, carry[1], carry[0])
        return (optax.apply_updates(carry[0], updates), state), None

    return jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), flat)[0]


def test_codes_on_the_host_are_refused():
    with pytest.raises(ValueError, match=r"axis_name=.*LowBit\(on_host=True\)"):
        adama(1e-2, axis_name="data", bits=LowBit(8, on_host=True))


@pytest.mark.parametrize("kind", ["galore", "codes"])
def test_microbatch_over_devices(kind):
    """`microbatch` finds that they reduce; one step of it in a shard_map."""
    tx = galore(1e-2, **GALORE, micro_batches=N, axis_name="data")
    if kind == "codes":
        tx = adama(1e-2, micro_batches=N, axis_name="data", bits=8)
    loss = lambda p, x, rng: jnp.mean((x @ p["w"] + p["b"][None]) ** 2)
    step = jaxmem.microbatch(loss, tx, N, donate=False, axis_name="data")
    x = jnp.asarray(np.random.default_rng(3).standard_normal((8 * N * 2, 8)), "float32")
    run = jax.shard_map(
        lambda p, s, x: step(p, s, x, None),
        mesh=mesh_of(),
        in_specs=(P(), P(), P("data")),
        out_specs=P(),
    )
    params, state, metrics = jax.jit(run)(PARAMS, tx.init(PARAMS), x)
    assert float(jax.jit(loss)(params, x, None)) < float(metrics["loss"])
    with pytest.raises(ValueError, match="axis_name='data'.*shard_map"):
        tx.update(PARAMS, state, PARAMS, phase="apply")
