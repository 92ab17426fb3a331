"""bfloat16 parameters whose small updates count, and XLA's excess precision."""

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.optim import adam, adama, kahan_summation, split_master, stochastic_rounding
from jaxmem.optim.low_bit import bfloat16
from jaxmem.optim.low_bit.split_master import merged, split
from tests.arrays import array
from tests.optim.test_battery import batch, loss
from tests.sets import some_fast

WRAPPERS = {
    "stochastic": stochastic_rounding,
    "kahan": kahan_summation,
    "split_8": split_master,
    "split_16": lambda tx: split_master(tx, 16),
}
each = pytest.mark.parametrize("wrap", WRAPPERS.values(), ids=WRAPPERS)


def apply(params, updates):
    """`optax.apply_updates`, as without the tests' strict promotion."""
    with jax.numpy_dtype_promotion("standard"):
        return optax.apply_updates(params, updates)


def narrow(seed=0, shape=(16, 64)):
    r = np.random.default_rng(seed)
    return {"w": array(r.standard_normal(shape), jnp.bfloat16)}


def ends_at(tx, increment, steps=10_000, elements=1024):
    """The mean of elements that begin at 1.0."""
    params = {"w": jnp.ones((elements,), jnp.bfloat16)}
    g = {"w": jnp.full((elements,), increment, jnp.float32)}

    def step(carry, _):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (apply(params, updates), state), None

    start = params, tx.init(params)
    params, _ = jax.jit(lambda c: jax.lax.scan(step, c, None, length=steps))(start)[0]
    return np.float64(params["w"]).mean()


@pytest.mark.fast("stochastic", "split_8")
@pytest.mark.parametrize("name", ["stochastic", "split_8", "split_16"])
def test_many_small_updates_add_up(name):
    """Plain bfloat16 stays at 1.0. A random walk of 10,000 roundings of 2**-7 at most
    has a standard deviation of 0.1, its mean over 1,024 elements of 0.3 %."""
    assert ends_at(WRAPPERS[name](optax.identity()), 1e-4) == pytest.approx(2, rel=0.01)


def test_what_kahan_summation_and_nearest_codes_leave():
    """As the docstrings say: a bias."""
    kahan = ends_at(kahan_summation(optax.identity()), 1e-4, elements=1)
    assert kahan == pytest.approx(2.03, abs=0.005)
    nearest = split_master(optax.identity(), stochastic=False)
    assert ends_at(nearest, 1e-5, elements=1) == 1.0


@each
def test_jitted_as_eager(wrap):
    """XLA would leave the roundings out; and the sum is exactly the new parameter."""
    tx = wrap(optax.scale(-(2.0**-7)))  # exact, so that no sum is fused with it
    params, state = narrow(), None
    for fn in (lambda f: f, jax.jit):

        def step(params, state, g):
            updates, state = tx.update(g, state, params)
            return apply(params, updates), state

        step, p, s = fn(step), params, tx.init(params)
        for i in range(4):
            p, s = step(p, s, narrow(i + 1))
        state = (p, s) if state is None else chex.assert_trees_all_equal(state, (p, s))


@each
def test_updates_end_at_the_new_parameter(wrap):
    """Also where it passes 0 and where it shrinks to nothing."""
    p = {"w": jnp.asarray([1.0, -3.0, 1e-3, 2.0**-130, 100.0, 0.0], jnp.bfloat16)}
    tx = wrap(optax.identity())
    g = {"w": jnp.asarray([-0.999, 3.5, -2e-3, 1e-3, 1e-9, -1e-30], jnp.float32)}
    updates, _ = tx.update(g, tx.init(p), p)
    new = np.float64(apply(p, updates)["w"])
    want = np.float64(p["w"]) + np.float64(g["w"])
    # a bfloat16 beside the sum; Kahan's is rounded to bfloat16 itself
    rounded = 2.0**-9 * abs(np.float64(g["w"])) if wrap is kahan_summation else 0
    assert (abs(new - want) <= 2.0**-7 * abs(want) + 2.0**-24 + rounded).all()


def test_stochastic_rounding_of_a_number():
    x = jnp.asarray([1.0, -1.5, 0.0, 1.0 + 2.0**-9, -(1.0 + 3 * 2.0**-9), jnp.inf])
    bits = array(np.random.default_rng(0).integers(0, 2**32, (4096, 6)), "uint32")
    got = np.float64(bfloat16.stochastic(jnp.broadcast_to(x, bits.shape), bits))
    assert (got[:, [0, 1, 2, 5]] == np.float64(x[jnp.array([0, 1, 2, 5])])).all()
    assert set(got[:, 3]) == {1.0, 1.0 + 2.0**-7}
    # five standard deviations of the mean of 4,096
    assert got[:, 3].mean() == pytest.approx(1 + 2.0**-9, abs=5 * 2.0**-7 / 2 / 64)
    assert got[:, 4].mean() == pytest.approx(-1 - 3 * 2.0**-9, abs=5 * 2.0**-7 / 128)


def test_kahan_summation_as_numpy():
    """To the bit, with numpy's own rounding to bfloat16."""
    r = np.random.default_rng(0)
    nearest = lambda x: x.astype(ml_dtypes.bfloat16).astype(np.float32)
    p, k = nearest(r.standard_normal(512).astype(np.float32)), np.float32(0)
    tx, params = kahan_summation(optax.identity()), {"w": array(p, jnp.bfloat16)}
    state = tx.init(params)
    for u in 1e-3 * r.standard_normal((20, 512)).astype(np.float32):
        k = nearest(k + u)
        p, old = nearest(p + k), p
        k = nearest(k + (old - p))
        updates, state = jax.jit(tx.update)({"w": jnp.asarray(u)}, state, params)
        params = apply(params, updates)
    np.testing.assert_array_equal(np.float32(params["w"]), p)
    np.testing.assert_array_equal(np.float32(state.rest["w"]), k)


def test_what_is_drawn_is_of_the_seed_and_the_step():
    u, p = {"w": jnp.full((16, 64), 1e-3)}, narrow()

    def ended(seed=0, steps=1):
        tx = stochastic_rounding(optax.identity(), seed)
        params, state = p, tx.init(p)
        for _ in range(steps):
            updates, state = tx.update(u, state, p)
            params = apply(p, updates)
        return np.float32(params["w"])

    np.testing.assert_array_equal(ended(), ended())
    assert (ended() != ended(seed=1)).any() and (ended() != ended(steps=2)).any()


@pytest.mark.parametrize("dtype, top", [(jnp.int8, 127), (jnp.int16, 32767)])
def test_a_split_master_is_the_weight(dtype, top):
    """To half a code of the correction, of half an ulp of bfloat16."""
    r = np.random.default_rng(0)
    w = array(r.standard_normal(4096) * 10.0 ** r.uniform(-20, 20, 4096), "float32")
    p = w.astype(jnp.bfloat16)
    update, c = split(p, w, dtype)
    assert not update.any()  # the parameter is the rounded master already
    half = np.ldexp(1.0, np.frexp(np.abs(np.float64(p)))[1] - 1 - 8)
    error = abs(np.float64(merged(p, c)) - np.float64(w))
    # float32 itself is 2**-16 of half an ulp of bfloat16, and the sum is rounded
    assert (error <= half * (0.5 / top + 2.0**-15)).all()


@pytest.mark.slow
def test_micro_batches_in_codes():
    """A split master round an AdamA that accumulates in 8 bits."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)
    tx = split_master(adama(1e-2, bits=8))
    draw = lambda *shape: 0.3 * jax.random.normal(jax.random.key(0), shape)
    params = {"layers": draw(3, 32, 64), "w": draw(64, 32), "b": draw(64)}
    params = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    step = jaxmem.microbatch(lambda p, x, rng: loss(wide(p), x), tx, 4, donate=False)
    state, losses = tx.init(params), []
    for _ in range(3):
        with jax.numpy_dtype_promotion("standard"):
            params, state, metrics = step(params, state, batch(16), None)
        losses.append(float(metrics["loss"]))
    assert losses[2] < losses[1] < losses[0]
    assert int(state.count) == 3 and int(state.inner[0].count) == 3


@pytest.mark.parametrize(
    "name", some_fast(["stochastic", "kahan", "split_8"], "split_8")
)
def test_the_stacked_update_is_released(name):
    """No float32 array of the stack's size is made."""
    tx = WRAPPERS[name](adam(1e-2, bits=8))
    params = narrow(shape=(3, 32, 64)) | {"b": jnp.ones((64,), jnp.bfloat16)}
    params = {"layers": params.pop("w"), **params, "w": narrow(shape=(64, 32))["w"]}

    def step(state, x):
        params, moments = state
        value, grads = jax.value_and_grad(
            lambda p: loss(jax.tree.map(lambda x: x.astype(jnp.float32), p), x)
        )(params)
        updates, moments = tx.update(grads, moments, params)
        return (apply(params, updates), moments), value

    state = params, tx.init(params)
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    plan = scheduled.plan(state, batch())
    gradients = [g for g in plan.gradients if g.shape == params["layers"].shape]
    assert gradients and all(g.released for g in gradients), str(plan)
    want, _ = jax.jit(step)(state, batch())
    got, _ = scheduled(jax.tree.map(jnp.copy, state), batch())
    # random bits are those of the whole stack; sums of the gradient differ
    near = dict(rtol=2.0**-7, atol=1e-6)
    chex.assert_trees_all_close(
        *(jax.tree.map(lambda x: x.astype(jnp.float32), s[0]) for s in (got, want)),
        **near,
    )


def test_other_leaves_and_bad_calls():
    tx = split_master(optax.sgd(0.5))
    params = narrow() | {"scale": jnp.ones((4,))}
    g = jax.tree.map(jnp.ones_like, params)
    updates, _ = tx.update(g, tx.init(params), params)
    assert updates["scale"].dtype == jnp.float32 and (updates["scale"] == -0.5).all()
    for wrap in WRAPPERS.values():
        with pytest.raises(ValueError, match="none of the parameters is bfloat16"):
            wrap(optax.sgd(0.5)).init({"w": jnp.ones(3)})
        with pytest.raises(ValueError, match="params=None"):
            wrap(optax.sgd(0.5)).update(g, wrap(optax.sgd(0.5)).init(params))
    with pytest.raises(ValueError, match=r"state\.correction\['w'\]"):
        split_master(optax.sgd(0.5), 16).update(g, tx.init(params), params)
    with pytest.raises(ValueError, match="bits=4: 8 or 16"):
        split_master(optax.sgd(0.5), 4)  # pyright: ignore[reportArgumentType]
