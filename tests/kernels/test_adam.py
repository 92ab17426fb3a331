"""Adam in one pass: the formulas, the rounding, the kernels, and no copies."""

import contextlib
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.optim import AdamAState, FusedAdam
from pallas_kernels import simulated
from pallas_kernels.adam import gpu as adam_gpu
from pallas_kernels.adam import reference
from pallas_kernels.adam import tpu as adam_tpu
from tests.arrays import array
from tests.optim.reference import RTOL, adama_tree, assert_near, at, gradients, tree
from tests.sets import some_fast

AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
KERNELS = {"tpu": adam_tpu.update, "cuda": adam_gpu.update}
FACTORS = jnp.asarray(
    reference.Factors(0.5, 0.9, 0.1, 0.99, 0.01, 1.9, 1.7, 1e-8, 1e-9, 0.1, 1e-2), "f4"
)
SEED = jnp.asarray([3, 4], jnp.uint32)
MASK = {"w": True, "b": False}


def leaf(shape, p="float32", moment="float32", g=None, seed=0):
    r = np.random.default_rng(seed)
    draw = lambda dtype: array(r.standard_normal(shape), dtype)
    v = jnp.square(draw("float32")).astype(moment)
    return {"p": draw(p), "m": draw(moment), "v": v, "g": draw(g or p)}


def run_steps(adam, params, grads, rng=None):
    """All mini-batches of `grads`, [steps, n, ...]: N - 1 accumulated, then a step."""
    steps, n = jax.tree.leaves(grads)[0].shape[:2]

    @jax.jit
    def mini(params, state, batch):
        def micro(state, g):
            return adam.accumulate(g, state, micro_batches=n), None

        state, _ = jax.lax.scan(micro, state, at(batch, slice(n - 1)))
        last = at(batch, n - 1)
        return adam.step(last, state, params, rng=rng, micro_batches=n)

    state = adam.init(params)
    for i in range(steps):
        params, state = mini(params, state, at(grads, i))
    return params, state


# -- the formulas


@pytest.mark.fast("False-4", "True-1")
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("x64", [False, True])
def test_equals_the_formulas(n, x64):
    with jax.enable_x64(x64):
        dtype = jnp.float64 if x64 else jnp.float32
        params, grads = tree(dtype=dtype), gradients(n, steps=20, dtype=dtype)
        hyper = {"b2": 0.99, "eps": 1e-6, "eps_root": 1e-7, "weight_decay": 0.1}
        moments = {"mu_dtype": dtype, "nu_dtype": dtype}
        adam = FusedAdam(1e-3, mask=MASK, **hyper, **moments)
        want = adama_tree(params, grads, decayed=MASK.get, lr=1e-3, **hyper)
        got, state = run_steps(adam, params, grads)
        assert_near(got, want[0], RTOL[dtype.dtype.name])
        assert_near((state.mu, state.nu), want[1:], 5 * RTOL[dtype.dtype.name])
        assert [int(x) for x in state[:3]] == [20, 0, n]


def schedule(count):
    return 1e-2 / (1 + jnp.asarray(count, float))


def test_equals_adamw():
    """One rounding of float32 a step apart: optax divides where this multiplies."""
    params, grads = tree(), gradients(1, steps=10)
    ours = FusedAdam(schedule, weight_decay=0.1, mask=lambda p: MASK)
    tx = optax.adamw(schedule, weight_decay=0.1, mask=MASK)
    got, state = run_steps(ours, params, grads)
    want, optax_state = params, tx.init(params)
    with jax.numpy_dtype_promotion("standard"):
        for i in range(10):
            g = at(grads, i, 0)
            updates, optax_state = jax.jit(tx.update)(g, optax_state, want)
            want = optax.apply_updates(want, updates)
    assert_near(got, want, 10 * 2**-24)
    assert_near((state.mu, state.nu), optax_state[0][1:], 10 * 2**-24)


def test_halves_make_a_step():
    """`accumulate` N times and `apply`: what `step` does with the last micro-batch."""
    params, grads = tree(), gradients(3, steps=1)
    adam = FusedAdam(1e-3)
    state = adam.init(params)
    assert isinstance(state, AdamAState)
    for i in range(3):
        state = adam.accumulate(at(grads, 0, i), state, micro_batches=3)
        assert int(state.micro_step) == i + 1 and int(state.count) == 0
    got, state = adam.apply(state, params)
    assert_near(got, run_steps(adam, params, grads)[0], 2**-23)
    assert [int(x) for x in state[:3]] == [1, 0, 3]


def test_weights_take_the_place_of_the_number():
    params, grads = tree(), gradients(1, steps=1)
    g = at(grads, 0, 0)
    adam = FusedAdam(1e-3)
    go = lambda **how: adam.accumulate(g, adam.init(params), **how).nu
    for n in (4, jnp.int32(4)):
        assert_near(go(micro_batches=n), go(micro_batches=1, weight=0.25), 2**-24)


# -- rounding at random


def rounded(values, seed=SEED):
    x = array(values, jnp.float32)
    place = reference.leaf_positions(x.shape)
    bits = jnp.broadcast_to(reference.random_bits(seed, *place), x.shape)
    return reference.rounded(x, jnp.bfloat16, bits)


@pytest.mark.parametrize("part", [0.0, 0.01, 0.3, 0.99])
def test_rounding_is_right_on_average(part):
    """Five standard deviations of 2**18 draws."""
    ulp, n = 2**-7, 2**18
    got = np.asarray(rounded(np.full((2**9, 2**9), -1 - part * ulp)), "f8")
    assert set(np.unique(got)) <= {-1.0, -1 - ulp}
    up = (got != -1).mean()
    assert abs(up - part) <= 5 * math.sqrt(part * (1 - part) / n) + 2**-16


def test_rounding_gives_a_neighbour():
    x = np.random.default_rng(0).standard_normal((64, 64)).astype("f4")
    x *= np.float32(10.0) ** np.arange(-38, 26)[:, None]
    got = np.asarray(rounded(x), "f4")
    below = (x.view("u4") & 0xFFFF0000).view("f4")  # towards zero
    above = ((x.view("u4") & 0xFFFF0000) + 0x10000).view("f4")
    assert ((got == below) | (got == above)).all()
    exact = np.asarray(jnp.asarray(x, jnp.bfloat16), "f4")
    np.testing.assert_array_equal(np.asarray(rounded(exact), "f4"), exact)


def test_rounding_keeps_what_is_not_finite():
    nans = np.full((1, 256), 0x7FFFFFFF, "u4").view("f4")  # bits would carry
    assert np.isnan(np.asarray(rounded(nans), "f4")).all()
    for x in (np.inf, -np.inf):
        assert (np.asarray(rounded(np.full((1, 256), x)), "f4") == x).all()


def test_small_steps_count():
    """Steps of 1e-3, a quarter of bfloat16's half unit below 1, for 100 steps."""
    params = {"w": jnp.ones((100, 100), jnp.bfloat16)}
    grads = {"w": jnp.ones((100, 1, 100, 100), jnp.bfloat16)}
    adam = FusedAdam(5e-4)
    stalled, _ = run_steps(adam, params, grads)
    assert (stalled["w"] == 1).all()
    moved, _ = run_steps(adam, params, grads, rng=jax.random.key(0))
    # 100 roundings to units of 2**-8, of 10,000 elements
    error = 5 * math.sqrt(100) * 2**-9 / 100
    assert abs(float(moved["w"].astype("f4").mean()) - 0.95) < error


def test_one_key_is_enough():
    """Steps and leaves have bits of their own, and the same key gives them again."""
    params = {k: jnp.ones((8, 128), jnp.bfloat16) for k in "ab"}
    grads = jax.tree.map(jnp.ones_like, params)
    adam = FusedAdam(1e-3)
    for key in (jax.random.key(0), jax.random.PRNGKey(0)):
        one, state = adam.step(grads, adam.init(params), params, rng=key)
        repeated, _ = adam.step(grads, adam.init(params), params, rng=key)
        two, _ = adam.step(grads, state, params, rng=key)
        jax.tree.map(np.testing.assert_array_equal, one, repeated)
        assert (one["a"] != one["b"]).any() and (one["a"] != two["a"]).any()
    assert adam.step(grads, state, params)[0]["a"].dtype == jnp.bfloat16


# -- the kernels


CASES = [
    ((2, 17, 150), {"p": "bfloat16"}),
    ((40, 3, 12), {"p": "bfloat16", "moment": "bfloat16"}),  # axes in another order
    ((1100,), {"g": "bfloat16"}),
]


@pytest.mark.fast(
    "(2, 17, 150)-{'p': 'bfloat16'}-cuda",
    "(40, 3, 12)-{'p': 'bfloat16', 'moment': 'bfloat16'}-tpu",
    "(1100,)-{'g': 'bfloat16'}-tpu",
    "(1100,)-{'g': 'bfloat16'}-cuda",
)
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("shape, dtypes", CASES, ids=str)
def test_kernel_equals_its_reference(platform, shape, dtypes):
    compare(platform, leaf(shape, **dtypes))


@pytest.mark.fast("p-tpu", "g-cuda")
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("without", ["p", "g"])
def test_kernel_of_half_an_update(platform, without):
    old = leaf((3, 300), p="bfloat16")
    del old[without]
    compare(platform, old)


@pytest.mark.slow
@pytest.mark.parametrize("platform", KERNELS)
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize(
    "shape", [(4, 3, 2, 130), (7, 5, 3, 64), (1, 33, 1), (0x1100,)]
)
@pytest.mark.parametrize("p", ["float32", "bfloat16"])
def test_kernel_on_other_shapes(platform, x64, shape, p):
    with jax.enable_x64(x64):
        compare(platform, leaf(shape, p=p))


def compare(platform, old):
    """float32 to three roundings of it; bfloat16 to that, and so mostly to the bit."""
    want = jax.jit(reference.update_leaf)(old, FACTORS, SEED)
    size = blocks(platform, old["m"])
    kernel = functools.partial(KERNELS[platform], block_size=size)
    with simulated(platform):
        got = jax.jit(kernel)(old, FACTORS, SEED)
    assert set(got) == set(want) == set(reference.written(old))
    for name, w in want.items():
        g = got[name]
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        eps = 3 * 2**-24 if w.dtype == jnp.float32 else 2**-7
        off = np.abs(np.asarray(g, "f8") - np.asarray(w, "f8"))
        assert (off <= eps * np.maximum(1, np.abs(np.asarray(w, "f8")))).all(), name
        if w.dtype == jnp.bfloat16:
            assert (off > 0).mean() < 1e-3, name


def blocks(platform, m):
    if platform == "cuda":
        return 512
    view = adam_tpu._view(m.shape).shape
    return tuple(map(min, view, (*[1] * (len(view) - 2), 16, 128)))


@pytest.mark.parametrize("platform", KERNELS)
def test_kernel_has_the_same_bits(platform):
    """The new parameter is 1 - 0.3 units exactly; bits decide how it is rounded."""
    shape = (3, 20, 40)
    p, zeros = jnp.ones(shape, jnp.bfloat16), jnp.zeros(shape)
    old = {"p": p, "m": zeros, "v": zeros + 1}
    factors = jnp.zeros(11).at[7].set(1.0).at[9].set(0.3 * 2**-8).at[10].set(1.0)
    want = jax.jit(reference.update_leaf)(old, factors, SEED)["p"]
    with simulated(platform):
        got = jax.jit(KERNELS[platform])(old, factors, SEED)["p"]
    assert 0.25 < float((want != 1).mean()) < 0.35
    np.testing.assert_array_equal(np.asarray(got, "f4"), np.asarray(want, "f4"))


SHAPES = [(768, 12, 64), (7, 7, 3, 64), (1, 1, 512, 64), (50, 1000), (5, 1, 3), (96,)]
# Stacked kernels of attention, and vocabularies that do not fill their lanes.
LARGE = [(24, 1024, 16, 64), (24, 16, 64, 1024), (768, 50257), (50257, 768)]
LARGE += [(9000, 32, 64), (3, 3, 2048, 1000)]
SMALL = [(2, 130, 4, 6), (4, 30, 2, 5), (1024,), (), (1, 1)]


@pytest.mark.parametrize("shape", SHAPES + SMALL, ids=str)
def test_view_knows_where_elements_are(shape):
    view = adam_tpu._view(shape)
    numbers = [np.broadcast_to(x, shape) for x in reference.leaf_positions(shape)]
    index = np.indices(view.shape)
    for want, strides in zip(numbers, (view.row, view.column), strict=True):
        seen = want.transpose(view.order).reshape(view.shape)
        got = sum(i * s for i, s in zip(index, strides, strict=True))
        np.testing.assert_array_equal(got, seen)
        back = adam_tpu._unseen(jnp.asarray(seen), view, shape)
        np.testing.assert_array_equal(np.asarray(back), want)


@pytest.mark.parametrize("platform", some_fast(KERNELS, "cuda"))
def test_tree_end_to_end(platform):
    """Through the public function: every shape of leaf, micro-batches in a scan."""
    r = np.random.default_rng(0)
    draw = lambda *s: array(r.standard_normal(s), jnp.bfloat16)
    params = {"w": draw(24, 30), "deep": [draw(7), draw()]}
    grads = jax.tree.map(lambda p: draw(2, 2, *p.shape), params)
    key = jax.random.key(0)
    make = functools.partial(FusedAdam, 1e-2, weight_decay=0.1)
    want = run_steps(make(), params, grads, rng=key)
    with simulated(platform):
        got = run_steps(make(implementation="pallas"), params, grads, rng=key)
    off = [
        float((jnp.abs(a.astype("f4") - b.astype("f4")) > 1e-6).mean())
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    ]
    assert max(off) <= 2e-3  # where a last digit of float32 decided


@pytest.mark.parametrize("platform", ["tpu", "cuda"])
def test_under_vmap(platform):
    if platform == "cuda" and jax.__version_info__ < (0, 11):
        pytest.skip("the simulator cannot; what is compiled can, see below")
    old = leaf((3, 520), p="bfloat16")
    factors, seeds = jnp.stack([FACTORS, FACTORS * 0.5, FACTORS]), jnp.stack([SEED] * 3)
    args = old, factors, seeds
    want = jax.jit(jax.vmap(reference.update_leaf))(*args)
    with simulated(platform):
        got = jax.jit(jax.vmap(KERNELS[platform]))(*args)
    assert_near(got, want, 2**-7)
    assert_near(got["m"], want["m"], 3 * 2**-24)


# -- compiled for chips that are not there


def compiled_step(target, params, mode="step"):
    """What a donated update takes."""
    adam = FusedAdam(1e-3, implementation="pallas")
    state = jax.eval_shape(adam.init, params)
    key = jax.eval_shape(lambda: jax.random.key(0))
    if mode == "step":
        step = lambda p, s, g, k: adam.step(g, s, p, rng=k)
    else:

        def step(p, s, g, k):
            micro = lambda s, g: (adam.accumulate(g, s, micro_batches=4), None)
            s, _ = jax.lax.scan(micro, s, jax.tree.map(lambda x: x[None], g))
            return adam.apply(s, p, rng=k)

    return jaxmem.estimate(
        step, params, state, params, key, target=target, donate_argnums=(0, 1)
    )


def struct(*shape, dtype="bfloat16"):
    return jax.ShapeDtypeStruct(shape, dtype)


# What the kernel and XLA need beside leaves: 256 to 346 KiB, by the version of libtpu,
# which brings small leaves into its fast memory as well.
OWN = 2**19
MODEL = {"w": struct(2048, 4096), "heads": struct(2048, 12, 64), "norm": struct(2048)}
TARGETS = [
    pytest.param(t, marks=pytest.mark.skipif(t not in AVAILABLE, reason="targets"))
    for t in ("h100", "tpu-v5e")
]


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("mode", ["step", "scan"])
def test_nothing_is_copied(target, mode):
    """Parameters and moments are written over, 10 bytes each; no leaf is a temporary.

    In a scan there is the micro-batch's gradient, 2 bytes.
    """
    report = compiled_step(target, MODEL, mode)
    size = sum(math.prod(s.shape) for s in MODEL.values())
    assert report.alias_bytes >= 10 * size
    assert report.temp_bytes <= OWN + (2 * size if mode == "scan" else 0)


@pytest.mark.slow
@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("shape", SHAPES + LARGE)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_no_shape_is_copied(target, shape, dtype):
    report = compiled_step(target, {"w": struct(*shape, dtype=dtype)})
    assert report.temp_bytes <= OWN


@pytest.mark.parametrize("target", [TARGETS[1]])
@pytest.mark.slow
def test_compiles_in_double_precision_mode(target):
    with jax.enable_x64(True):
        compiled_step(target, {"w": struct(512, 130)})


@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("target", TARGETS)
def test_compiles_under_vmap(target, x64):
    adam = FusedAdam(1e-3, implementation="pallas")
    params = {"w": struct(3, 64, 520)}
    with jax.enable_x64(x64):
        state = jax.eval_shape(jax.vmap(adam.init), params)
        step = jax.vmap(lambda p, s, g: adam.step(g, s, p))
        jaxmem.estimate(step, params, state, params, target=target)


# -- what is refused


def refusal(params, platform=None, **how):
    adam = FusedAdam(1e-3, implementation="pallas", **how)
    with simulated(platform) if platform else contextlib.nullcontext():
        adam.step(params, adam.init(params), params)


def test_dtypes_that_no_kernel_does():
    with jax.enable_x64(True), pytest.raises(ValueError, match="bfloat16, not float64"):
        refusal({"w": jnp.ones(3, jnp.float64)})
    half = {"w": jnp.ones(3, jnp.float16)}
    with pytest.raises(ValueError, match="TPU: float32 and bfloat16, not float16"):
        refusal(half, "tpu")
    refusal(half, "cuda")
    with pytest.raises(ValueError, match="at least one element"):
        refusal({"w": jnp.ones((3, 0))})
    with pytest.raises(NotImplementedError, match="multiples of 512, not 300"):
        adam_gpu.update(leaf((1000,)), FACTORS, block_size=300)


def test_no_kernel_on_a_cpu():
    with pytest.raises(ValueError, match="no kernel for the platform"):
        refusal({"w": jnp.ones(3)})


def test_bad_arguments():
    with pytest.raises(ValueError, match="implementation='cuda'"):
        FusedAdam(1e-3, implementation="cuda")  # pyright: ignore
    with pytest.raises(ValueError, match="b1=1.0"):
        FusedAdam(1e-3, b1=1.0)
    adam, params = FusedAdam(1e-3), tree()
    with pytest.raises(TypeError, match="real floating"):
        adam.init({"n": jnp.arange(3)})
    state = adam.init(params)
    with pytest.raises(ValueError, match=r"at \['b'\] have shapes \(5,\), .*\(1,\)"):
        adam.step(params | {"b": jnp.ones(1)}, state, params)
    with pytest.raises(ValueError, match="micro_batches=0"):
        adam.accumulate(params, state, micro_batches=0)
    with pytest.raises(ValueError):
        adam.step({"w": params["w"]}, state, params)
