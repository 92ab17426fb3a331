"""AdamA: the paper's rule, Adam at one micro-batch, and what its docstring says."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jaxmem.optim import AdamAState, adama, scale_by_adama
from tests.optim.reference import (
    RTOL,
    adama_tree,
    assert_near,
    assert_same,
    at,
    gradients,
    tree,
)
from tests.sets import some_fast

PARAMS = tree()


@functools.partial(jax.jit, static_argnums=0)
def run(tx, params, grads):
    """Every micro-batch by a plain call."""

    def micro(carry, g):
        params, state = carry
        updates, state = tx.update(g, state, params)
        return (optax.apply_updates(params, updates), state), updates

    flat = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), grads)
    return jax.lax.scan(micro, (params, tx.init(params)), flat)


@functools.partial(jax.jit, static_argnums=0)
def run_phases(tx, params, grads, weights=None, keeps=None):
    """Every mini-batch by phases, the micro-batches in a scan."""
    n = jax.tree.leaves(grads)[0].shape[1]

    def mini(carry, batch):
        params, state = carry

        def micro(state, one):
            g, w, k = one
            extra = {"weight": w, "keep": k, "micro_batches": n}
            return tx.update(g, state, params, phase="accumulate", **extra)[::-1]

        state, zeros = jax.lax.scan(micro, state, batch)
        zeros = at(zeros, 0)
        updates, state = tx.update(zeros, state, params, phase="apply")
        return (optax.apply_updates(params, updates), state), zeros

    return jax.lax.scan(mini, (params, tx.init(params)), (grads, weights, keeps))


def moments(state):
    head = state[0]
    assert isinstance(head, AdamAState)
    return head.mu, head.nu


VARIANTS = [
    {"mode": "paper"},
    {"mode": "paper", "v_scale": "mean"},
    {"mode": "ema"},
    {"mode": "fractional"},
]
MASK = {"w": True, "b": False}


@pytest.mark.fast(
    "paper-2-False",
    "paper-2-True",
    "paper-mean-2-False",
    "ema-2-False",
    "fractional-2-False",
)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("n", some_fast([2, 1, 8], 2))
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_equals_the_formulas(variant, n, x64):
    """50 mini-batches against NumPy, by plain calls and by phases in a scan."""
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        params, grads = tree(dtype=dtype), gradients(n, dtype=dtype)
        hyper = variant | {"b2": 0.99, "eps": 1e-6, "eps_root": 1e-7}
        tx = adama(1e-3, weight_decay=0.1, mask=MASK, micro_batches=n, **hyper)
        want = adama_tree(
            params, grads, decayed=MASK.get, lr=1e-3, weight_decay=0.1, **hyper
        )
        for go in run, run_phases:
            (got, state), _ = go(tx, params, grads)
            assert_near(got, want[0], RTOL[dtype.dtype.name])
            # b1 and b2 are rounded to the dtype and raised to the 50th power
            assert_near(moments(state), want[1:], 5 * RTOL[dtype.dtype.name])
        assert int(state[0].count) == (50 * n if variant["mode"] == "ema" else 50)


def test_nesterov_equals_the_formulas():
    with jax.enable_x64(True):
        params, grads = tree(dtype=jnp.float64), gradients(1, dtype=jnp.float64)
        (got, _), _ = run(adama(1e-3, nesterov=True), params, grads)
        assert_near(got, adama_tree(params, grads, nesterov=True)[0], 1e-12)


def linear(count):
    """A schedule; optax's own do not run under strict promotion."""
    return 1e-2 / (1 + jnp.asarray(count, float))


PARTIAL = functools.partial
REFERENCES = {
    "adam": (adama, optax.adam),
    "mean": (PARTIAL(adama, v_scale="mean"), optax.adam),
    "ema": (PARTIAL(adama, mode="ema"), optax.adam),
    "fractional": (PARTIAL(adama, mode="fractional"), optax.adam),
    "nadam": (PARTIAL(adama, nesterov=True), optax.nadam),
    "adamw": (
        PARTIAL(adama, weight_decay=0.1, mask=MASK),
        PARTIAL(optax.adamw, weight_decay=0.1, mask=MASK),
    ),
    "nadamw": (
        PARTIAL(adama, weight_decay=0.1, nesterov=True, eps_root=1e-6),
        PARTIAL(optax.nadamw, weight_decay=0.1, eps_root=1e-6),
    ),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("name", REFERENCES)
def test_one_micro_batch_is_adam_to_the_bit(name, compiled):
    ours, theirs = REFERENCES[name]
    grads = gradients(1, steps=6)
    results = []
    for tx in ours(linear), theirs(linear):
        update = jax.jit(tx.update) if compiled else tx.update
        params, state = PARAMS, tx.init(PARAMS)
        # optax divides by 1 - b ** int32, which strict promotion forbids
        with jax.numpy_dtype_promotion("standard"):
            for i in range(6):
                updates, state = update(at(grads, i, 0), state, params)
                params = optax.apply_updates(params, updates)
        results.append((params, state[0].mu, state[0].nu, state[0].count))
    assert_same(*results)


def accumulated_adam(grads):
    """Adam's moments on the mean gradients of the mini-batches."""
    tx = optax.scale_by_adam()
    state = tx.init(PARAMS)
    with jax.numpy_dtype_promotion("standard"):
        for i in range(len(grads["w"])):
            mean = jax.tree.map(lambda g, i=i: g[i].mean(0), grads)
            _, state = tx.update(mean, state)
    return state


def test_first_moment_is_that_of_accumulation():
    grads = gradients(8, steps=10)
    (_, state), _ = run(adama(1e-3, micro_batches=8), PARAMS, grads)
    # eight additions in place of one mean: roundings of 2**-24 of the moments
    assert_near(moments(state)[0], accumulated_adam(grads).mu, 1e-6)


def test_mean_second_moment_is_no_less_than_that_of_accumulation():
    grads = gradients(8, steps=10)
    (_, mean), _ = run(adama(1e-3, micro_batches=8, v_scale="mean"), PARAMS, grads)
    (_, paper), _ = run(adama(1e-3, micro_batches=8), PARAMS, grads)
    exact = accumulated_adam(grads).nu
    for v, w, u in zip(
        *map(jax.tree.leaves, (moments(mean)[1], exact, moments(paper)[1])), strict=True
    ):
        assert (np.asarray(v) >= np.asarray(w) * (1 - 1e-6)).all()
        assert (np.asarray(v) > 2 * np.asarray(w)).any()
        assert (np.asarray(u) < np.asarray(w)).any()


@pytest.mark.parametrize("snr", [0.0, 0.3, 10.0])
def test_step_is_longer_by_what_the_docstring_says(snr):
    n, count = 8, 4096
    draws = np.random.default_rng(0).standard_normal((1, n, count)) + snr
    grads = {"x": jnp.asarray(draws, jnp.float32)}
    params = {"x": jnp.zeros(count)}
    (_, state), _ = run(adama(1e-3, micro_batches=n), params, grads)
    exact = np.square(draws.mean(1)).mean()
    ratio = np.sqrt(exact / (float(state[0].nu["x"].mean()) / 1e-3))
    want = np.sqrt((snr**2 + 1 / n) * n / (snr**2 + 1))
    # the variance of 4096 squares is 2, so four sigma are 0.088, half that in the root
    assert abs(ratio / want - 1) < 0.05


def test_plain_calls_wait():
    n = 4
    tx = adama(linear, weight_decay=0.1, micro_batches=n)
    grads = gradients(n, steps=3)
    (_, state), updates = run(tx, PARAMS, grads)
    moved = np.asarray([np.abs(u).max() > 0 for u in updates["w"]])
    np.testing.assert_array_equal(moved, [False, False, False, True] * 3)
    assert [int(x) for x in state[0][:3]] == [3, 0, n]
    assert int(state[2].count) == 3
    want = adama_tree(PARAMS, grads, lr=lambda t: 1e-2 / (1 + t), weight_decay=0.1)
    (params, _), _ = run(tx, PARAMS, grads)
    assert_near(params, want[0], 1e-6)


@pytest.mark.fast("paper", "fractional")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_phases_and_plain_calls_agree(variant):
    grads = gradients(4, steps=5)
    tx = adama(linear, weight_decay=0.1, micro_batches=4, **variant)
    (params, state), _ = run(tx, PARAMS, grads)
    (other, other_state), zeros = run_phases(tx, PARAMS, grads)
    assert not any(z.any() for z in jax.tree.leaves(zeros))
    # compiled apart, so that a product and a sum may be fused in one and not the other
    assert_near((other, moments(other_state)), (params, moments(state)), 1e-6)
    assert_same(other_state[0][:3], state[0][:3])


def test_accumulating_leaves_the_parameters_out():
    tx = adama(1e-3, weight_decay=0.1, micro_batches=4)

    def accumulate(params):
        return tx.update(PARAMS, tx.init(PARAMS), params, phase="accumulate")

    text = str(jax.make_jaxpr(accumulate)(PARAMS))
    assert "sqrt" not in text and "div" not in text and "reduce" not in text


@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_weights_replace_one_over_n(variant):
    grads = gradients(3, steps=5)
    tokens = np.random.default_rng(0).integers(1, 9, (5, 3))
    weights = tokens / tokens.sum(1, keepdims=True)
    tx = adama(1e-3, **variant)
    (got, state), _ = run_phases(tx, PARAMS, grads, jnp.asarray(weights, jnp.float32))
    want = adama_tree(PARAMS, grads, weights=weights, **variant)
    assert_near((got, moments(state)), (want[0], want[1:]), 5e-6)


@pytest.mark.fast("paper", "ema")
@pytest.mark.parametrize("variant", VARIANTS, ids=lambda v: "-".join(v.values()))
def test_what_is_not_kept_counts_as_zeros(variant):
    n = 3
    grads = gradients(n, steps=4)
    keeps = jnp.asarray([[1, 0, 1], [0, 1, 1], [1, 1, 1], [0, 0, 0]], bool)
    masks = lambda g: keeps.reshape(4, n, *(1,) * (g.ndim - 2))
    bad = jax.tree.map(lambda g: jnp.where(masks(g), g, jnp.nan), grads)
    zero = jax.tree.map(lambda g: jnp.where(masks(g), g, 0.0), grads)
    tx = adama(1e-3, **variant)
    (got, state), _ = run_phases(tx, PARAMS, bad, None, keeps)
    (want, want_state), _ = run_phases(tx, PARAMS, zero)
    assert_near((got, moments(state)), (want, moments(want_state)), 1e-6)


@pytest.mark.parametrize("dtypes", [(None, None), (None, "float32"), ("float32",) * 2])
def test_bfloat16_parameters(dtypes):
    """Dtypes hold, and float32 moments are those of the rounded gradients."""
    params, grads = tree(dtype=jnp.bfloat16), gradients(2, dtype=jnp.bfloat16, steps=5)
    tx = adama(1e-3, mu_dtype=dtypes[0], nu_dtype=dtypes[1], micro_batches=2)
    state = tx.init(params)
    for step in range(5):
        for i in range(2):
            updates, new = jax.jit(tx.update)(at(grads, step, i), state, params)
            assert shapes(new) == shapes(state)
            assert shapes(updates) == shapes(params)
            state = new
    want = adama_tree(params, grads)[1:]
    # half a unit of bfloat16's eighth bit, at each of ten roundings
    for got, exact, dtype in zip(moments(state), want, dtypes, strict=True):
        assert_near(got, exact, 5e-6 if dtype else 10 * 2**-9)


def shapes(tree):
    return jax.tree.map(lambda x: (x.shape, x.dtype), tree)


def test_bfloat16_second_moment_stalls():
    """What the docstring warns of: v stays where it is when gradients vanish."""
    params = {"x": jnp.ones((4,), jnp.bfloat16)}
    for dtype, falls in ((None, False), (jnp.float32, True)):
        tx = scale_by_adama(nu_dtype=dtype)
        state = tx.init(params)
        _, state = tx.update(params, state)
        before = state.nu["x"]
        for _ in range(20):
            _, state = tx.update(jax.tree.map(jnp.zeros_like, params), state)
        assert bool((state.nu["x"] < before).all()) is falls


def test_init_needs_no_values():
    tx = adama(linear, weight_decay=0.1, micro_batches=2)
    structs = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype), PARAMS)
    assert shapes(jax.eval_shape(tx.init, structs)) == shapes(tx.init(PARAMS))


def test_no_buffer_is_shared():
    """Else a donated state has a buffer twice, or takes a parameter with it."""
    n = jnp.int32(2)
    for tx in adama(1e-3, micro_batches=n), optax.inject_hyperparams(adama)(1e-3):
        state = tx.init(PARAMS)
        leaves = [n, *jax.tree.leaves((PARAMS, state))]
        leaves = [x for x in leaves if isinstance(x, jax.Array)]
        assert len({x.unsafe_buffer_pointer() for x in leaves}) == len(leaves)
        step = jax.jit(tx.update, donate_argnums=1)
        for _ in range(3):
            _, state = step(at(gradients(1, steps=1), 0, 0), state, PARAMS)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_moments_keep_the_sharding_of_the_parameters(kind):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(kind,))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    params = {"w": jax.device_put(jnp.ones((16, 4)), sharding)}
    grads = {"w": jax.device_put(jnp.full((16, 4), 0.5), sharding)}
    tx = adama(1e-3, weight_decay=0.1, micro_batches=2)
    state = tx.init(params)
    step = jax.jit(tx.update)
    text = step.lower(grads, state, params).compile().as_text()
    assert not any(w in text for w in ("all-gather", "all-reduce", "all-to-all"))
    for _ in range(2):
        for moment in moments(state):
            assert moment["w"].sharding.is_equivalent_to(sharding, 2)
        updates, state = step(grads, state, params)
    assert updates["w"].sharding.is_equivalent_to(sharding, 2)


def test_in_shard_map():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    tx = adama(1e-3, micro_batches=2)
    grads = gradients(2, steps=2, seed=3)
    stacked = jax.tree.map(lambda p: jnp.stack([p] * 8), PARAMS)
    ranks = jax.tree.map(lambda g: jnp.stack([g * (i + 1) for i in range(8)]), grads)

    def one(params, grads):
        (params, _), _ = run(tx, at(params, 0), at(grads, 0))
        return jax.tree.map(lambda p: p[None], params)

    spec = PartitionSpec("x")
    got = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)(stacked, ranks)
    want = jax.vmap(lambda p, g: run(tx, p, g)[0][0])(stacked, ranks)
    assert_near(got, want, 1e-6)


def test_vmap():
    tx = adama(1e-3, micro_batches=2)
    grads = [gradients(2, steps=2, seed=s) for s in (5, 6)]
    both = jax.tree.map(lambda *g: jnp.stack(g), *grads)
    got = jax.vmap(lambda g: run(tx, PARAMS, g)[0][0])(both)
    for i, g in enumerate(grads):
        assert_near(at(got, i), run(tx, PARAMS, g)[0][0], 1e-6)


def test_missing_gradients():
    """None where there is no gradient, in the state (Equinox) or not."""
    params = {"w": jnp.ones(3), "frozen": None}
    for filtered in params, {"w": jnp.ones(3), "frozen": jnp.ones(2)}:
        tx = adama(1e-3)
        updates, state = tx.update(params, tx.init(filtered), filtered)
        assert updates["frozen"] is None and updates["w"].shape == (3,)
        assert shapes(state) == shapes(tx.init(filtered))


def test_python_and_numpy_numbers():
    params = {"a": 1.0, "b": np.ones(2, np.float32)}
    tx = adama(np.float64(0.1), b1=np.float64(0.9), b2=np.float32(0.999))
    state = tx.init(params)
    updates, new = tx.update(params, state, params)
    assert shapes(new) == shapes(state)
    # the first step of Adam is the sign of the gradient, but for 1 - b2 in float32
    np.testing.assert_allclose(updates["a"], -0.1, rtol=1e-4)


def test_tree_map_params():
    tx = adama(1e-3, weight_decay=0.1)
    state = optax.tree_utils.tree_map_params(tx, lambda _: "p", tx.init(PARAMS))
    assert set(jax.tree.leaves(moments(state))) == {"p"}
    assert state[0].count.dtype == jnp.int32


def test_a_scan_of_micro_batches_keeps_no_gradient():
    """The moments are updated in place: temporaries are less than one copy of them."""
    size = 1 << 18
    params = {"w": jnp.ones((size,))}
    tx = adama(1e-3, micro_batches=4)

    def mini(params, state, xs):
        def micro(state, x):
            grads = jax.tree.map(lambda p: jnp.sin(p * x), params)
            return tx.update(grads, state, params, phase="accumulate")[1], None

        state, _ = jax.lax.scan(micro, state, xs)
        updates, state = tx.update(params, state, params, phase="apply")
        return optax.apply_updates(params, updates), state

    args = params, tx.init(params), jnp.arange(4.0)
    compiled = jax.jit(mini, donate_argnums=(0, 1)).lower(*args).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 4 * size


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"b1": 1.0}, "b1=1.0"),
        ({"b2": -0.1}, "b2=-0.1"),
        ({"eps": -1.0}, "eps=-1.0"),
        ({"micro_batches": 0}, "micro_batches=0"),
        ({"micro_batches": 2.0}, "micro_batches=2.0"),
        ({"micro_batches": True}, "micro_batches=True"),
        ({"micro_batches": jnp.zeros(2, jnp.int32)}, "micro_batches"),
        ({"mode": "optimi"}, "one of 'paper', 'ema', 'fractional'"),
        ({"v_scale": "max"}, "one of 'paper', 'mean'"),
        ({"mode": "ema", "v_scale": "mean"}, "v_scale='mean' with mode='ema'"),
        ({"nesterov": True, "micro_batches": 2}, "nesterov=True with micro_batches=2"),
        ({"nu_dtype": jnp.int8}, "nu_dtype"),
        ({"mu_dtype": jnp.int8}, "mu_dtype"),
    ],
)
def test_bad_arguments(kwargs, text):
    with pytest.raises((TypeError, ValueError), match=text):
        adama(1e-3, **kwargs)


@pytest.mark.parametrize(
    ("nesterov", "kwargs", "text"),
    [
        (False, {"phase": "finish"}, "phase='finish'"),
        (False, {"weight": jnp.ones(2)}, "weight=float32"),
        (False, {"keep": jnp.ones(())}, "keep=.*a bool"),
        (False, {"keep": jnp.ones(2, bool)}, "keep=bool.*a bool"),
        (False, {"phase": "accumulate", "micro_batches": -1}, "micro_batches=-1"),
        (True, {"phase": "apply"}, "nesterov=True with phase"),
        (True, {"keep": True}, "nesterov=True with phase"),
        (True, {"micro_batches": 2}, "nesterov=True with micro_batches=2"),
    ],
)
def test_bad_calls(nesterov, kwargs, text):
    tx = adama(1e-3, nesterov=nesterov)
    with pytest.raises((TypeError, ValueError), match=text):
        tx.update(PARAMS, tx.init(PARAMS), PARAMS, **kwargs)


def test_bad_parameters():
    with pytest.raises(TypeError, match=r"params\['i'\] is int32"):
        adama(1e-3).init({"i": jnp.zeros(2, jnp.int32)})
