"""Lion and schedule-free AdamW: beside optax's, in codes, and what is refused."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem import optim
from jaxmem.optim import LowBit, lion, schedule_free, schedule_free_adamw
from jaxmem.optim import schedule_free_eval_params as eval_params
from jaxmem.optim.low_bit.codes import unpack
from tests.arrays import array
from tests.optim.cases import averaged
from tests.optim.test_battery import batch, gradients, params, run, train_step

ROUNDED = functools.partial(chex.assert_trees_all_close, rtol=1e-5, atol=50 * 2.0**-24)


@pytest.fixture(autouse=True)
def standard_promotion():
    """optax's counters need it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def every(bits, **how):
    return LowBit(bits, least_size=0, **how)


# -- Lion


@pytest.mark.parametrize("how", [{}, {"b1": 0.95, "b2": 0.98, "weight_decay": 0.1}])
def test_lion_as_optax(how):
    rate = optax.linear_schedule(1e-3, 1e-2, 20)
    want, _ = run(optax.lion(rate, **how), params(), gradients())
    ROUNDED(run(lion(rate, **how), params(), gradients())[0], want)


def turned(bits):
    """The share of updates whose sign the codes turn."""
    r = np.random.default_rng(0)
    grads = 0.1 * r.standard_normal((8, 512)) + r.standard_normal((200, 8, 512))
    grads = array(grads, jnp.float32)

    def signs(bits):
        tx = optim.scale_by_lion(bits=bits)
        step = lambda state, g: tx.update(g, state)[::-1]
        run = jax.jit(lambda grads: jax.lax.scan(step, tx.init(grads[0]), grads)[1])
        return run(grads)

    return float((signs(bits) != signs(32)).mean())


def test_signs_that_codes_turn():
    """As the docstring says: 1 in 160, and 1 in 7."""
    assert turned(every(8)) == pytest.approx(1 / 160, rel=0.1)
    assert turned(every(4)) == pytest.approx(1 / 7, rel=0.1)


def test_a_constant_gradient_is_lions_momentum():
    """On average, of elements of any size in a group; to the nearest it is more."""
    g = jnp.broadcast_to(jnp.linspace(0.5, 1, 64), (2, 64))

    def mean(**how):
        tx, how = optim.scale_by_lion(bits=every(8, **how)), every(8)
        step = lambda state, _: (tx.update(g, state)[1], None)
        state = jax.jit(lambda s: jax.lax.scan(step, s, None, 2000)[0])(tx.init(g))
        return float((unpack(how.formats[0], state.mu) / g).mean())

    assert mean() == pytest.approx(1, rel=0.01)
    assert mean(stochastic=False) == pytest.approx(1.1, rel=0.01)


# -- schedule-free


def test_schedule_free_as_optax():
    rate = optax.warmup_constant_schedule(0.0, 1e-2, 10)
    how = {"b1": 0.95, "weight_decay": 0.1}
    given, grads = params(), gradients()
    want, theirs = run(optax.contrib.schedule_free_adamw(1e-2, 10, **how), given, grads)
    got, state = run(schedule_free_adamw(rate, **how), given, grads)
    ROUNDED(got, want)
    warm, _ = run(schedule_free_adamw(1e-2, 10, **how), given, grads)
    chex.assert_trees_all_equal(warm, got)
    average = optax.contrib.schedule_free_eval_params(theirs, want)
    ROUNDED(eval_params(state, got), average)
    ahead = jax.tree.map(jnp.subtract, theirs.z, average)
    ROUNDED(state.ahead, ahead)


def test_another_rule_inside_as_optax():
    rule, given, grads = optax.sgd(0.1), params(), gradients()
    for b1 in (0.5, 1.0):
        want, _ = run(optax.contrib.schedule_free(rule, 0.1, b1), given, grads)
        ROUNDED(run(schedule_free(rule, 0.1, b1), given, grads)[0], want)
    # optax divides by b1: here 0 is the rule itself
    got, state = run(schedule_free(rule, 0.1, 0.0), given, grads)
    ROUNDED(got, run(rule, given, grads)[0])


@pytest.mark.parametrize("bits, most", [(8, 0.03), (4, 0.3)])
def test_the_average_in_codes(bits, most):
    """Beside float64, in parts of how far the weights have moved."""
    given, grads = params(), gradients()
    tx = averaged.made(bits=every(bits))
    got, state = run(tx, given, grads)
    x = eval_params(state, got)
    p, g = np.float64(given["w"]), np.float64(grads["w"])
    y, _, average = averaged.sequences(p, g, lambda t: averaged.LR)
    for mine, want in ((got["w"], y), (x["w"], average)):
        error = np.sqrt(np.mean((np.float64(mine) - want) ** 2))
        assert error <= most * np.sqrt(np.mean((want - p) ** 2))
    size = lambda tree: sum(a.nbytes for a in jax.tree.leaves(tree))
    wide = tx.init(given), averaged.made().init(given)
    assert size(wide[0]) < size(wide[1]) * {8: 0.28, 4: 0.16}[bits]


def test_small_steps_are_kept_in_the_average():
    """A constant gradient: z runs ahead of x by half of its way; to the nearest not."""
    grads = jnp.ones((1000, 4, 64))
    start = jnp.zeros((4, 64))

    def ahead(**how):
        tx = schedule_free(optax.sgd(1e-2), 1e-2, 0.9, bits=every(8, **how))
        p, state = run(tx, start, grads)
        return float((p - eval_params(state, p)).mean()) / 0.1

    assert ahead() == pytest.approx(-5, rel=0.05)
    assert abs(ahead(stochastic=False) + 5) > 1


@pytest.mark.parametrize(
    "how",
    [
        *(every(8, code=code) for code in ("companding", "float8", "dynamic")),
        every(4),
        every(8, code="mxfp8"),
        *(every(4, code=code) for code in ("mxfp4", "nvfp4")),
        LowBit(32),
    ],
    ids=lambda how: f"{how.bits}-{how.code}",
)
def test_the_codes_of_an_average_are_known(how):
    """Of a leaf whose scales could be those of another format."""
    p = {"w": jnp.ones((16, 256))}
    tx = schedule_free(optax.sgd(0.1), 0.1, 0.5, bits=how)
    g = {"w": array(np.random.default_rng(0).standard_normal((16, 256)), "float32")}
    updates, state = tx.update(g, tx.init(p), p)
    p = optax.apply_updates(p, updates)
    # the first step's share is 1: z, x and y are one
    chex.assert_trees_all_close(eval_params((state,), p), p, rtol=1e-6)
    updates, state = tx.update(g, state, p)
    p = optax.apply_updates(p, updates)
    z_less_x = -0.1 * np.float64(g["w"]) / 2
    found = 2 * (np.float64(p["w"]) - np.float64(eval_params(state, p)["w"]))
    gap = {"mxfp4": 1 / 2, "nvfp4": 6 / 17}.get(how.code, 0.23)
    assert abs(found - z_less_x).max() <= gap * abs(z_less_x).max()


@pytest.mark.parametrize("wrap", [optim.stochastic_rounding, optim.split_master])
def test_bfloat16_weights(wrap):
    """Without a float32 copy their average is that of float32 weights."""
    given, grads = params(jnp.bfloat16), gradients()
    got, state = run(wrap(averaged.made(bits=every(8))), given, grads)
    wide, theirs = run(averaged.made(), params(), grads)
    assert got["w"].dtype == jnp.bfloat16
    x, want = eval_params(state, got), eval_params(theirs, wide)
    moved = np.abs(np.float64(wide["w"]) - np.float64(params()["w"])).max()
    error = np.abs(np.float64(x["w"]) - np.float64(want["w"])).max()
    # 50 roundings at random of parameters below 2, four standard deviations
    assert error <= 0.1 * moved + 4 * 50**0.5 * 2.0**-8


# -- schedule, micro-batches


MAKE = {
    "lion, 8 bits": lambda: lion(1e-3, bits=every(8)),
    "lion, 4 bits": lambda: lion(1e-3, bits=every(4)),
    "schedule-free, 8 bits": lambda: schedule_free_adamw(1e-3, bits=every(8)),
    "schedule-free, 4 bits": lambda: schedule_free_adamw(1e-3, bits=every(4)),
    "schedule-free lion": lambda: schedule_free(lion(1e-3), 1e-3, bits=every(8)),
}


@pytest.mark.fast("lion, 4 bits", "schedule-free, 8 bits")
@pytest.mark.parametrize("name", MAKE)
def test_released_in_codes(name):
    """The same random numbers a layer at a time, and over micro-batches a sum."""
    tx, given = MAKE[name](), params()
    state = given, tx.init(given)
    plan = jaxmem.schedule(train_step(tx), donate_argnums=0).plan(state, batch())
    (gradient,) = (g for g in plan.gradients if g.shape == given["layers"].shape)
    assert gradient.released, str(plan)
    scheduled = jaxmem.schedule(train_step(tx), donate_argnums=())
    want, got = jax.jit(train_step(tx))(state, batch()), scheduled(state, batch())
    chex.assert_trees_all_close(got[0][0], want[0][0], rtol=1e-4, atol=1e-6)


# -- refused


def test_refused():
    tx, p = schedule_free_adamw(bits=every(8)), {"w": jnp.ones((4, 64))}
    with pytest.raises(ValueError, match="warm-up of its own"):
        schedule_free_adamw(optax.constant_schedule(0.1), 10)
    with pytest.raises(TypeError, match="not 0"):
        eval_params(optax.adam(0.1).init(p), p)
    state = tx.init(p)
    with pytest.raises(TypeError, match="not 2"):
        eval_params((state, state), p)
    with pytest.raises(ValueError, match="2 leaves, the state has 1"):
        eval_params(state, {**p, "b": jnp.ones(3)})
    with pytest.raises(ValueError, match=r"state\.ahead\['w'\]"):
        eval_params(state, {"w": jnp.ones((4, 128))})
    with pytest.raises(ValueError, match=r"state\.ahead\['w'\]"):
        schedule_free_adamw(bits=every(4)).update(p, state, p)
    with pytest.raises(ValueError, match=r"state\.mu\['w'\]"):
        lion(0.1, bits=8).update(p, lion(0.1, bits=every(8)).init(p), p)
