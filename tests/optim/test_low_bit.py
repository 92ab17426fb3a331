"""Moments in codes: the maps, their errors, blocks, chunks of rows, options, AdamA."""

import functools

import chex
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.ir import row_chunks
from jaxmem.optim import LowBit, adam, adama, scale_by_adam, scale_by_adama
from jaxmem.optim.low_bit import moments
from jaxmem.optim.low_bit.codes import FORMATS, pack, unpack
from tests.arrays import array
from tests.optim import test_battery as battery
from tests.optim.cases import low_bit as numpy_side
from tests.sets import slow_unless, some_fast

FLOAT32 = 2.0**-23
kinds = pytest.mark.parametrize(
    "kind", FORMATS, ids=lambda kind: f"{kind[1]}_{kind[0]}"
)


def moment(which, shape, spread=2.0, seed=0):
    """Of values whose magnitudes differ within a block."""
    r = np.random.default_rng(seed)
    size = np.exp(spread * r.standard_normal(shape))
    signs = r.choice([-1, 1], shape) if which == 0 else 1
    return jnp.asarray(size * signs, jnp.float32)


@functools.partial(jax.jit, static_argnums=(0, 1))
def stored(kind, which, x, draw=None):
    """A moment out of its codes, in blocks of 64."""
    fmt = FORMATS[kind][which]
    return unpack(fmt, pack(fmt, 64, x, draw))


@pytest.mark.parametrize("which", [0, 1])
def test_the_dynamic_map_is_bitsandbytes(which):
    """Its 256 values, and each of many numbers becomes the nearest of them."""
    fmt = FORMATS[8, "dynamic"][which]
    table = numpy_side.dynamic_table(which == 0)
    codes = jnp.arange(256, dtype=jnp.uint8)
    np.testing.assert_allclose(fmt.decode(codes), table, rtol=4 * FLOAT32)
    np.testing.assert_array_equal(fmt.encode(fmt.decode(codes)), codes)
    y = np.random.default_rng(0).uniform(-1 if which == 0 else 0, 1, 2048) ** 5
    near = np.abs(y[:, None] - table[None]).argmin(1)
    np.testing.assert_array_equal(fmt.encode(jnp.float32(y)), near)
    # published check values
    if which == 0:
        assert table[0] == pytest.approx(-0.99296875)
        assert table[127] == 0 and table[128] == pytest.approx(5.5e-7)
    else:
        assert table[1:4] == pytest.approx([3.25e-7, 7.75e-7, 2.125e-6])


@pytest.mark.parametrize("which", [0, 1])
def test_float8_is_that_of_ml_dtypes(which):
    """To the nearest, ties to even, and no second moment becomes zero."""
    fmt, r = FORMATS[8, "float8"][which], np.random.default_rng(0)
    halves = np.arange(0, 449, dtype=np.float32)  # with all ties from 16 on
    sizes = np.concatenate([halves, 448 * np.exp(-14 * r.uniform(size=4096))])
    y = np.float32(sizes / 448) * (r.choice([-1, 1], sizes.shape) if which == 0 else 1)
    y = jnp.float32(y)
    # the same multiplication in float32
    want = np.asarray(y * 448.0).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
    want = np.maximum(want, 2.0**-9) if which else want
    got = np.asarray(fmt.encode(y)).astype(np.float32)
    np.testing.assert_array_equal(got, want)
    np.testing.assert_allclose(fmt.decode(fmt.encode(y)), want / 448, rtol=FLOAT32)


@pytest.mark.parametrize("which", [0, 1])
def test_float8_has_one_relative_error_over_five_decades(which):
    fmt = FORMATS[8, "float8"][which]
    y = jnp.exp(-jnp.linspace(0.0, 12.0, 4096))  # down to 6e-6
    error = np.abs(fmt.decode(fmt.encode(y)) - y)
    normal = np.asarray(y) >= 2.0**-6 / 448
    assert (error <= 2.0**-4 * y * (1 + 8 * FLOAT32))[normal].all()
    assert error[~normal].max() <= 2.0**-10 / 448 * (1 + 8 * FLOAT32)
    # half a step just above a power of two
    assert (error / y)[normal].max() >= 0.99 / 17


@pytest.mark.parametrize("which", [0, 1])
def test_the_four_bit_map_is_torchaos(which):
    fmt = FORMATS[4, "dynamic"][which]
    table = numpy_side.four_bit_table(which == 0)
    codes = jnp.arange(16, dtype=jnp.int32)
    np.testing.assert_allclose(fmt.decode(codes), table, rtol=FLOAT32)
    np.testing.assert_array_equal(fmt.encode(fmt.decode(codes)), codes)
    y = np.random.default_rng(0).uniform(-1 if which == 0 else 0, 1, 512)
    near = np.abs(y[:, None] - table[None]).argmin(1)
    np.testing.assert_array_equal(fmt.encode(jnp.float32(y)), near)


@pytest.mark.fast("adam_4_bits")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(
            case, marks=slow_unless(case.name != "adamw_dynamic"), id=case.name
        )
        for case in numpy_side.OTHERS
    ],
)
def test_other_codes_in_the_battery(case):
    battery.test_as_the_reference(case)
    battery.test_state_is_made_from_shapes_and_keeps_its_types(case)
    battery.test_its_stacked_gradient_is_released(case)


# the largest error of a rounding, of a block's largest value (or its root)
BOUNDS = {
    (8, "companding"): (1 / 127, 1 / 510 + 2.0**-7 / 255),
    # half of the 32 from one number to the next below 448
    (8, "float8"): (16 / 448, 16 / 448),
    (8, "dynamic"): (0.45 / 64, 0.45 / 128),
    (4, "dynamic"): (0.1125, 1 / 32),
}


@kinds
@pytest.mark.parametrize("which", [0, 1])
def test_error_of_a_rounding(kind, which):
    x = moment(which, (8, 256), spread=1.0)
    got, fmt = stored(kind, which, x), FORMATS[kind][which]
    root = np.sqrt if fmt.root else np.asarray
    wide, back = (root(np.float64(a)).reshape(-1, 64) for a in (x, got))
    error = abs(back - wide) / abs(wide).max(-1, keepdims=True)
    smallest = {(8, "companding"): 2 / 255, (4, "dynamic"): 1 / 16}.get(kind, 0.0)
    held = wide >= smallest * wide.max(-1, keepdims=True) if which else ~np.isnan(wide)
    assert error[held].max() <= BOUNDS[kind][which] + 8 * FLOAT32
    if which:  # a second moment becomes larger rather than 0
        assert (back[~held] >= wide[~held]).all()


@kinds
@pytest.mark.parametrize("which", [0, 1])
def test_stochastic_rounding_is_unbiased(kind, which):
    x = jnp.broadcast_to(moment(which, (1, 64), spread=0.5), (4096, 64))
    draw = array(np.random.default_rng(1).uniform(size=x.shape), jnp.float32)
    got, wide = np.float64(stored(kind, which, x, draw)), np.float64(x[0])
    off = got.std(0) / 4096**0.5
    least = wide.max() * {(8, "companding"): (2 / 255) ** 2}.get(kind, 1 / 16)
    some = wide > least if which else wide > -0.88 * abs(wide).max()
    # five standard deviations, and the rounding of the scale and the sums
    assert (abs(got.mean(0) - wide) <= 5 * off + 1e-6 * abs(wide).max())[some].all()
    assert some.any()


def test_bytes_of_a_parameter():
    p = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    wanted = {
        8: 2 + 4 / 32,
        LowBit(8, code="dynamic"): 2 + 8 / 256,
        LowBit(8, code="float8"): 2 + 8 / 128,
        4: 1 + 8 / 128,
        32: 8,
        LowBit(8, block=64): 2 + 4 / 64,
    }
    for bits, each in wanted.items():
        made = jax.eval_shape(scale_by_adam(bits=bits).init, {"w": p})
        nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(made)) - 4
        assert nbytes / p.size == each, bits


def test_the_block_divides_the_leaf():
    """Halved down to 16; what is small or odd keeps float32."""
    four = LowBit(4)
    assert [four.block_of((16, n, 64 * n)) for n in (2, 3, 9)] == [128, 64, 64]
    assert four.block_of((64, 80)) == 16
    assert four.block_of((512, 24)) is None
    assert four.block_of((63, 64)) is None
    assert LowBit(8, block=128).block_of((64, 64)) is None
    assert LowBit(8, least_size=0).block_of((32,)) == 32
    p = jnp.ones((512, 24))
    state = scale_by_adam(bits=4).init({"w": p})
    assert state.mu["w"].dtype == jnp.float32 and state.mu["w"].shape == p.shape


def test_a_stack_is_its_layers():
    """To the bit: nothing goes from one layer to another."""
    tx = adam(1e-2, bits=LowBit(8, least_size=0))
    g = moment(0, (3, 16, 64))
    whole = tx.update({"w": g}, tx.init({"w": g}))[0]["w"]
    for i in range(3):
        one = tx.update({"w": g[i]}, tx.init({"w": g[i]}))[0]["w"]
        chex.assert_trees_all_equal(one, whole[i])


def in_chunks(monkeypatch, elements):
    """Leaves of any size go in chunks of that many elements, on CPU too."""
    monkeypatch.setattr(row_chunks, "LEAST_ELEMENTS", 1)
    monkeypatch.setattr(row_chunks, "_CHUNK", elements)
    loops = lambda fn, chunks, platforms, *arrays: chosen(
        fn, chunks, (*platforms, "cpu"), *arrays
    )
    chosen = row_chunks.on_platforms
    monkeypatch.setattr(moments, "on_platforms", loops)


@pytest.mark.fast("moved-shape0-1")
@pytest.mark.parametrize("shape, outer", [((200, 64), 1), ((512, 64), 4)])
@pytest.mark.parametrize("phase", some_fast(["moved", "accumulated"], "moved"))
def test_chunks_of_rows_change_nothing(monkeypatch, shape, outer, phase):
    """Random bits included, and rows that fill no chunk."""
    p = {"w": jnp.zeros(shape)}
    how = LowBit(8, code="dynamic", block=32, stochastic=True)
    g = {"w": moment(0, shape, 0.5)}

    def run():
        tx = scale_by_adam(bits=how) if phase == "moved" else scale_by_adama(bits=how)
        step = jax.jit(lambda g, s: tx.update(g, s))
        _, state = step(g, tx.init(p))
        return step(g, state)

    want = run()
    in_chunks(monkeypatch, 64 * (128 if outer > 1 else 48))
    chunks = row_chunks.chunks_of(shape)
    assert chunks is not None and chunks.outer == outer
    assert shape[0] // outer % chunks.rows or outer > 1
    got = run()
    # u is rounded where the loop fuses otherwise
    chex.assert_trees_all_close(got[0], want[0], rtol=4 * FLOAT32)
    chex.assert_trees_all_equal(got[1], want[1])


def log_normal(steps, how, spread=3.0, size=1e-2):
    """The largest |update| of any step, on gradients of very different magnitudes."""
    tx, key = scale_by_adam(bits=how), jax.random.key(0)
    sizes = size * jnp.exp(spread * jax.random.normal(key, (64, 256)))

    def step(carry, i):
        state, worst = carry
        g = sizes * jax.random.normal(jax.random.fold_in(key, i), sizes.shape)
        u, state = tx.update(g, state)
        return (state, jnp.maximum(worst, jnp.abs(u).max())), None

    start = tx.init(sizes), jnp.zeros(())
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(steps)))
    return float(run(start)[0][1])


LARGEST = 2.35


def test_it_is_stable_for_a_while():
    """FlashOptim's own codes give 2,509 here within 200 steps."""
    assert log_normal(60, LowBit(8)) <= LARGEST


@pytest.mark.slow
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("size", [1e-2, 1e-7])
def test_it_is_stable(bits, size):
    assert log_normal(10_000, LowBit(bits), size=size) <= LARGEST


def error_of_adama(stochastic, n=32, steps=30):
    """Of the sum of updates in codes, relative to that of moments in float32."""
    r = np.random.default_rng(0)
    grads = array(0.3 + r.standard_normal((steps * n, 8, 512)), jnp.float32)

    def summed(bits):
        tx = scale_by_adama(bits=bits, micro_batches=n)

        def step(carry, g):
            u, state = tx.update(g, carry[0])
            return (state, carry[1] + u), None

        start = tx.init(grads[0]), jnp.zeros_like(grads[0])
        return jax.jit(lambda c: jax.lax.scan(step, c, grads))(start)[0][1]

    got, want = summed(LowBit(8, stochastic=stochastic)), summed(32)
    return float(jnp.linalg.norm(got - want) / jnp.linalg.norm(want))


def test_adama_rounds_stochastically():
    """To the nearest, what each of 32 micro-batches adds is lost."""
    assert error_of_adama(None) < 0.2 * error_of_adama(False)


def test_adama_in_float32_is_adama():
    g = {"w": moment(0, (8, 64))}
    runs = []
    for tx in (scale_by_adama(bits=32), scale_by_adama()):
        runs.append(tx.update(g, tx.init(g)))
    chex.assert_trees_all_equal(*runs)


def test_bad_options():
    with pytest.raises(ValueError, match=r"bits=7: 4, 8 or 32"):
        adam(1e-3, bits=7)
    with pytest.raises(ValueError, match=r"code='linear': with bits=8 'companding'"):
        LowBit(8, code="linear")
    with pytest.raises(ValueError, match="code='companding': with bits=4"):
        LowBit(4, code="companding")
    with pytest.raises(ValueError, match="block=33: even"):
        LowBit(4, block=33)
    with pytest.raises(ValueError, match="mu_dtype=.* with bits=4"):
        adama(1e-3, bits=4, mu_dtype=jnp.float32)
    injected = optax.inject_hyperparams(adam)
    with pytest.raises(TypeError, match="static_args"):
        injected(learning_rate=1e-3, bits=8).init({"w": jnp.ones(3)})
    injected(learning_rate=1e-3).init({"w": jnp.ones(3)})


def test_a_state_of_other_options_or_parameters():
    p = {"w": jnp.ones((64, 64))}
    of = lambda bits: scale_by_adam(bits=bits).init(p)
    for state in (of(4), of(32), of(LowBit(8, code="dynamic", block=32))):
        with pytest.raises(ValueError, match=r"state\.mu\['w'\]"):
            scale_by_adam(bits=8).update(p, state)
    other = {"w": jnp.ones((64, 128))}
    with pytest.raises(ValueError, match=r"state\.mu\['w'\]"):
        scale_by_adam(bits=8).update(other, of(8))
    with pytest.raises(ValueError, match=r"state\.mu\['w'\]"):
        scale_by_adama(bits=4).update(p, scale_by_adama(bits=8).init(p))
    with pytest.raises(TypeError, match=r"params\['i'\]"):
        scale_by_adam(bits=8).init({"i": jnp.ones((64, 64), jnp.int32)})


def placed(shape, *spec):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    return jax.device_put(jnp.ones(shape), NamedSharding(mesh, P(*spec)))


def test_sharding():
    """Codes and scales as the parameter; a block that a shard cuts is refused."""
    p = {"w": placed((32, 256), None, "data")}
    state = scale_by_adam(bits=LowBit(4, block=32)).init(p)
    for x in jax.tree.leaves((state.mu, state.nu)):
        assert x.sharding.spec == p["w"].sharding.spec
    with pytest.raises(ValueError, match=r"block=128 .* params\['w'\], 32 of 256"):
        scale_by_adam(bits=4).init(p)


@pytest.mark.slow
def test_rows_that_would_be_gathered(monkeypatch):
    in_chunks(monkeypatch, 64 * 32)
    p = {"w": placed((512, 64), "data")}
    with pytest.warns(UserWarning, match=r"by_rows=False"):
        scale_by_adam(bits=8).init(p)
    scale_by_adam(bits=LowBit(8, by_rows=False)).init(p)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "target"),
    [
        (LowBit(8), "tpu-v5e"),
        *(
            (how, target)
            for how in (LowBit(8, code="dynamic"), LowBit(4))
            for target in ("h100", "tpu-v5e")
        ),
    ],
)
def test_temporaries_of_a_leaf(how, target):
    """At most half a byte a parameter; the updates take the gradient's place."""
    tx, p = scale_by_adam(bits=how), jax.ShapeDtypeStruct((30522, 1024), jnp.float32)
    args = p, jax.eval_shape(tx.init, p)
    report = jaxmem.estimate(tx.update, *args, target=target, donate_argnums=(0, 1))
    assert report.temp_bytes <= 0.5 * p.size


@pytest.mark.slow
@pytest.mark.parametrize("code", ["companding", "float8"])
def test_temporaries_where_the_update_is_one_kernel(code):
    """On a GPU, by arithmetic: parameters included, no array of updates is made."""
    tx, p = (
        adam(1e-3, bits=LowBit(8, code=code)),
        jax.ShapeDtypeStruct((30522, 1024), jnp.float32),
    )

    def step(p, state, g):
        u, state = tx.update(g, state)
        return optax.apply_updates(p, u), state

    args = p, jax.eval_shape(tx.init, p), p
    report = jaxmem.estimate(step, *args, target="h100", donate_argnums=(0, 1))
    assert report.temp_bytes <= 0.5 * p.size
