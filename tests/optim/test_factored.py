"""Factored and layer-wise optimizers: optax's, layers by layers, and their bytes."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.optim import (
    LowBit,
    adafactor,
    adalomo,
    adam_mini,
    came,
    lomo,
    scale_by_adam_mini,
    scale_by_factored_rms,
    scale_by_sm3,
    sm3,
)
from tests.arrays import array
from tests.optim.cases.factored import Estimate, rms
from tests.optim.test_battery import batch, loss, params, run, train_step
from tests.scheduling.problem import bytes_of, temp_bytes

SHAPES = {"w": (16, 24), "b": (24,), "kernel": (12, 2, 10)}


def drawn(shapes, steps=0, seed=0, scale=0.3):
    """Of normal numbers with a direction: [*shape], or [steps, *shape]."""
    r = np.random.default_rng(seed)
    lead = (steps,) * bool(steps)
    draw = lambda s: array(scale * (0.3 + r.standard_normal((*lead, *s))), "f4")
    return jax.tree.map(draw, shapes, is_leaf=lambda s: isinstance(s, tuple))


def moved(tx, start, grads):
    return run(tx, start, grads)[0]


def assert_near(got, want):
    """Ten steps, each with some roundings of 2**-24 of the largest element."""
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        atol = 50 * 2.0**-24 * float(jnp.abs(w).max())
        np.testing.assert_allclose(g, w, rtol=0, atol=atol)


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


# -- optax's, where it is right

ADAFACTORS = {
    "default": {},
    "momentum and decay": {"momentum": 0.9, "weight_decay_rate": 1e-3},
    "bare": {"multiply_by_parameter_scale": False, "clipping_threshold": None},
    "whole": {"factored": False},
    "a rate of None": {"learning_rate": None},
}


@pytest.mark.fast("default", "momentum and decay", "a rate of None")
@pytest.mark.parametrize("name", ADAFACTORS)
def test_adafactor_is_optax_s_without_layers(name):
    options = {"learning_rate": 1e-2, "min_dim_size_to_factor": 8} | ADAFACTORS[name]
    start, grads = drawn(SHAPES), drawn(SHAPES, 10, seed=1)
    want = moved(optax.adafactor(**options), start, grads)
    got = moved(adafactor(**options, stacked=False), start, grads)
    assert_near(got, want)


def test_sm3_is_optax_s_without_layers():
    start, grads = drawn(SHAPES), drawn(SHAPES, 10, seed=1)
    want = moved(optax.sm3(1e-2), start, grads)
    got = moved(sm3(1e-2, stacked=False), start, grads)
    assert_near(got, want)


def test_adalomo_is_adafactor_with_all_matrices_factored():
    start, grads = drawn(SHAPES), drawn(SHAPES, 10, seed=1)
    want = moved(adafactor(1e-2, 0, stacked=False), start, grads)
    got = moved(adalomo(1e-2, stacked=False), start, grads)
    assert_near(got, want)


@pytest.mark.usefixtures("standard_promotion")  # optax's bias correction asks for it
def test_adam_mini_with_a_block_an_element_is_adam():
    start, grads = drawn(SHAPES), drawn(SHAPES, 10, seed=1)
    want = moved(optax.adamw(1e-2, weight_decay=0.1), start, grads)
    tx = adam_mini(1e-2, weight_decay=0.1, full=True)
    assert_near(moved(tx, start, grads), want)


def test_an_offset_of_the_decay_is_not_nan():
    """Steps before it have no memory; those after it decay as the first ones do."""
    start, grads = drawn({"w": (16, 24)}), drawn({"w": (16, 24)}, 8, seed=1)
    offset = scale_by_factored_rms(step_offset=3, min_dim_size_to_factor=8)
    plain = scale_by_factored_rms(min_dim_size_to_factor=8)
    after = run(offset, start, grads)[1].nu
    # the step whose count is 3 is the first one that counts
    want = run(plain, start, jax.tree.map(lambda g: g[3:], grads))[1].nu
    chex.assert_trees_all_close(after, want, rtol=1e-6)
    theirs = optax.scale_by_factored_rms(step_offset=3, min_dim_size_to_factor=8)
    after = run(theirs, start, grads)[1]
    assert jnp.isnan(after.v_row["w"]).any(), "optax is right now: say so no more"


@pytest.mark.parametrize("make", [adalomo, lambda lr: adafactor(lr, 2)])
def test_squares_of_rank_one_are_kept_exactly(make):
    """The first update is then the sign of the gradient times the rate's RMS(p)."""
    r = np.random.default_rng(3)
    a, b = np.exp(r.standard_normal((2, 20))).astype(np.float32)
    signs = np.where(r.uniform(size=(20, 20)) < 0.5, -1, 1).astype(np.float32)
    g, p = jnp.asarray(signs * np.outer(a, b)), drawn((20, 20))
    tx = make(1.0)
    update, _ = tx.update(g, tx.init(p), p)
    np.testing.assert_allclose(update, -signs * rms(np.asarray(p)), rtol=1e-5)


# -- layers

MAKE = {
    "came": came,
    "adalomo": adalomo,
    "adafactor": lambda lr, **k: adafactor(lr, 2, **k),
    "sm3": sm3,
    "adam_mini": adam_mini,
}


def at(tree, i, axis=0):
    return jax.tree.map(lambda x: jnp.take(x, i, axis), tree)


@pytest.mark.fast("came", "adafactor", "sm3")
@pytest.mark.parametrize("name", MAKE)
def test_more_layers_than_rows(name):
    """Each layer as if it were alone, matrices and vectors; optax mixes them here."""
    shapes = {"w": (7, 4, 6), "b": (7, 6)}
    # layers of other sizes: what they share would be seen
    sizes = jnp.arange(1.0, 8.0).reshape(1, 7)
    start, grads = drawn(shapes), drawn(shapes, 5, seed=1)
    grads = jax.tree.map(lambda g: g * sizes.reshape(1, 7, *[1] * (g.ndim - 2)), grads)
    got = moved(MAKE[name](1e-2, stacked=["w", "b"]), start, grads)
    for i in (0, 6):
        want = moved(MAKE[name](1e-2), at(start, i), at(grads, i, 1))
        chex.assert_trees_all_close(at(got, i), want, rtol=1e-5, atol=1e-6)


def test_clipping_over_the_whole_leaf_on_request():
    """One RMS for two layers, of which one has gradients that shrink."""
    p = drawn((2, 6, 8))
    grads = (
        drawn((2, 6, 8), 3, seed=1)
        * jnp.asarray([[1, 1], [1, 0.1], [1, 0.1]])[..., None, None]
    )
    got = moved(came(1e-2, per_layer=False), p, grads)
    wide, nu, unsure = np.float64(p), [Estimate() for _ in p], [Estimate() for _ in p]
    m = 0.0
    for g in np.float64(grads):
        u = [e.over_root(x, x**2 + 1e-30, 0.999, x) for e, x in zip(nu, g, strict=True)]
        u = np.stack(u) / max(1, rms(np.stack(u)))
        m = 0.9 * m + 0.1 * u
        pairs = zip(unsure, (u - m) ** 2 + 1e-16, m, strict=True)
        wide -= 1e-2 * np.stack([e.over_root(x, s, 0.9999, x) for e, s, x in pairs])
    np.testing.assert_allclose(got, wide, rtol=1e-5, atol=1e-6)
    assert np.abs(moved(came(1e-2), p, grads) - got).max() > 1e-3


def test_named_vectors_of_layers_are_released_too():
    """A bias [L, n] looks like a matrix: unnamed, its layers are mixed."""

    def loss(params, x):
        def layer(x, p):
            return jnp.tanh(x @ p["w"] + p["b"][None]), None

        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(state, x):
        given, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss)(given, x), opt_state, given)
        return optax.apply_updates(given, updates), opt_state

    given = drawn({"w": (3, 8, 8), "b": (3, 8)})
    for stacked, count in ((None, 1), (["w", "b"], 2)):
        tx = adalomo(1e-2, stacked=stacked)
        scheduled = jaxmem.schedule(step, donate_argnums=0)
        plan = scheduled.plan((given, tx.init(given)), jnp.ones((4, 8)))
        assert sum(g.released for g in plan.gradients) == count, str(plan)


# -- bytes


def test_adalomo_scheduled_holds_no_gradient_of_a_stack():
    """Next to no state, and of the gradients a layer's."""
    layers, width = 12, 64
    given = drawn({"layers": (layers, width, width), "head": (width, 2)})
    tx = adalomo(1e-2)
    state = given, tx.init(given)
    assert bytes_of(state[1]) <= 2 * (4 * layers * 2 * width)  # rows and columns

    def step(state, x):
        given, opt_state = state

        @jax.checkpoint
        def layer(x, w):
            return jnp.tanh(x @ w), None

        def loss(given):
            return jnp.mean((jax.lax.scan(layer, x, given["layers"])[0]) ** 2) + (
                jnp.mean((x @ given["head"]) ** 2)
            )

        updates, opt_state = tx.update(jax.grad(loss)(given), opt_state, given)
        return optax.apply_updates(given, updates), opt_state

    x = jnp.ones((4, width))
    scheduled = jaxmem.schedule(step, donate_argnums=0)
    plan = scheduled.plan(state, x)
    stack = bytes_of(given["layers"])
    assert (plan.released_bytes, plan.kept_bytes) == (stack, 0), str(plan)
    plain, ours = (temp_bytes(f, state, x, donate=0) for f in (step, scheduled))
    assert plain >= stack
    assert ours <= stack / 2, (ours, stack)


def test_bytes_of_states():
    m, n, layers = 32, 48, 3
    p = jax.ShapeDtypeStruct((layers, m, n), jnp.bfloat16)
    sizes = {
        name: bytes_of(jax.eval_shape(make(1e-3).init, p)) / 4
        for name, make in {**MAKE, "lomo": lomo}.items()
    }
    whole, factors = layers * m * n, layers * (m + n)
    assert sizes == {
        "came": whole + 2 * factors,
        "adalomo": factors + 1,
        "adafactor": factors + 1,
        "sm3": whole + factors,
        "adam_mini": whole + layers * n + 1,
        "lomo": 0,
    }


@pytest.mark.parametrize("make", [came, sm3, adam_mini])
@pytest.mark.parametrize("bits, each", [(8, 1 + 2 / 32), (4, 1 / 2 + 4 / 128)])
def test_bytes_of_momentum_in_codes(make, bits, each):
    """Of the first moment alone; what is beside it stays as it is."""
    p = jax.ShapeDtypeStruct((2, 64, 128), jnp.bfloat16)
    held = lambda **how: bytes_of(jax.eval_shape(make(1e-3, **how).init, p))
    assert held() - held(bits=bits) == 2 * 64 * 128 * (4 - each)


@pytest.mark.parametrize("make", [came, sm3, adam_mini])
def test_momentum_of_other_codes_is_refused(make):
    p = drawn((64, 128))
    with pytest.raises(ValueError, match="mu.*other options"):
        make(1e-3, bits=8).update(p, make(1e-3, bits=4).init(p), p)
    with pytest.raises(ValueError, match="on_host"):
        make(1e-3, bits=LowBit(8, on_host=True))


def test_lomo_clips_by_the_global_norm_in_two_passes():
    tx = optax.chain(optax.clip_by_global_norm(0.01), lomo(1e-1, weight_decay=0.1))
    given = params()
    state = given, tx.init(given)
    step = jaxmem.schedule(train_step(tx), donate_argnums=0, clip="two_pass")
    plan = step.plan(state, batch())
    assert (plan.released_bytes, plan.kept_bytes) == (given["layers"].nbytes, 0)
    want, _ = jax.jit(train_step(tx))(state, batch())
    got, _ = step(jax.tree.map(jnp.copy, state), batch())
    chex.assert_trees_all_close(got, want, rtol=1e-5, atol=1e-6)


def test_a_batch_that_is_not_finite_can_be_left_out():
    tx, given = adalomo(1e-2), params()
    step = jaxmem.microbatch(loss, tx, 2, donate=False, skip_nonfinite=True)
    bad = batch(8).at[0].set(jnp.nan)
    after, state, _ = step(given, tx.init(given), bad, None)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves((after, state)))


# -- blocks

BLOCKS = {
    "an output": (None, (3, 1, 8)),
    "a row": ((-1, 1), (3, 4, 1)),
    "a head": ((1, 2), (3, 1, 2)),
    "blocks of rows and columns": ((2, 4), (3, 2, 4)),
    "all": ((1, 1), (3, 1, 1)),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks(name):
    counts, shape = BLOCKS[name]
    tx = scale_by_adam_mini(blocks=None if counts is None else {"w": counts})
    g = drawn({"w": (3, 4, 8)}, seed=1)
    update, state = tx.update(g, tx.init(g))
    assert state.nu["w"].shape == shape
    (_, b, c), x = shape, np.float64(g["w"])
    mean = (x.reshape(3, b, 4 // b, c, 8 // c) ** 2).mean((2, 4))
    np.testing.assert_allclose(state.nu["w"], mean / 1000, rtol=1e-5)
    root = np.sqrt(np.repeat(np.repeat(mean, 4 // b, 1), 8 // c, 2))
    np.testing.assert_allclose(update["w"], x / (root + 1e-8), rtol=1e-5)


def test_heads_are_released():
    tx = adam_mini(1e-2, blocks={"layers": (1, 8)})
    given = params()
    step = jaxmem.schedule(train_step(tx), donate_argnums=0)
    plan = step.plan((given, tx.init(given)), batch())
    (stack,) = (g for g in plan.gradients if g.shape == given["layers"].shape)
    assert stack.released, str(plan)


# -- what is refused

REFUSED = {
    "blocks that do not divide": (
        lambda: scale_by_adam_mini(blocks={"w": (1, 5)}).init(drawn(SHAPES)),
        r"Adam-mini: blocks=\(1, 5\) of 'w': .*\(16, 24\)",
    ),
    "blocks of another number of axes": (
        lambda: scale_by_adam_mini(blocks={"w": (5,)}).init(drawn(SHAPES)),
        r"blocks=\(5,\) of 'w'",
    ),
    "a pattern without a match": (
        lambda: came(1.0, stacked="blocks").init(drawn(SHAPES)),
        "CAME: stacked: 'blocks' matches no path",
    ),
    "layers of a scalar": (
        lambda: adalomo(1.0, stacked="s").init({"s": jnp.ones(())}),
        r"stacked: the leaf \['s'\] is f.*32\[\]: a stacked leaf has an axis 0",
    ),
    "no parameters": (
        lambda: adalomo().update(SMALL, adalomo().init(SMALL)),
        "params=None: AdaLomo scales",
    ),
}
SMALL = {"w": jnp.ones((2, 3))}


@pytest.mark.parametrize("name", REFUSED)
def test_is_refused(name):
    call, match = REFUSED[name]
    with pytest.raises(ValueError, match=match):
        call()


@pytest.mark.parametrize("name", MAKE)
def test_a_state_of_other_shapes_is_refused_by_path(name):
    tx = MAKE[name](1.0)
    other = {"w": jnp.ones((4, 5))}
    with pytest.raises(ValueError, match=r"the state of \['w'\] has shape"):
        tx.update(other, tx.init(SMALL), other)
    with pytest.raises(ValueError, match="not of the structure"):
        tx.update({"v": SMALL["w"]}, tx.init(SMALL), {"v": SMALL["w"]})


@pytest.mark.parametrize("name", MAKE)
def test_integers_are_refused_by_path(name):
    with pytest.raises(TypeError, match=r"params\['n'\] is int32\[3\]"):
        MAKE[name](1.0).init({"n": jnp.ones(3, jnp.int32)})


def test_sm3_of_a_scalar():
    """optax's has no accumulator for it."""
    tx = scale_by_sm3(b1=0.0)
    update, _ = tx.update(jnp.float32(2.0), tx.init(jnp.float32(0.0)))
    assert float(update) == pytest.approx(1.0)
