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


@pytest.mark.slow
@pytest.mark.parametrize("case", numpy_side.OTHERS[-3:], ids=lambda case: case.name)
def test_microscaling_in_the_rest_of_the_battery(case, tmp_path):
    battery.test_donated_state_is_updated_in_place(case)
    battery.test_sharded_as_the_parameters(case)
    battery.test_scheduled(case)
    battery.test_micro_batches(case)
    battery.test_bfloat16_parameters(case)
    battery.test_restored_by_orbax(case, tmp_path)


# the largest error of a rounding, of a block's largest value (or its root)
BOUNDS = {
    (8, "companding"): (1 / 127, 1 / 510 + 2.0**-7 / 255),
    # half of the 32 from one number to the next below 448
    (8, "float8"): (16 / 448, 16 / 448),
    (8, "dynamic"): (0.45 / 64, 0.45 / 128),
    (4, "dynamic"): (0.1125, 1 / 32),
    # clipped from 2 to the largest mantissa, 1.75 or 1.5; e5m2 halfway above a power
    (8, "mxfp8"): (1 / 8, 1 / 9),
    # 5 is as far from 4 as from 6
    (4, "mxfp4"): (1 / 5, 1 / 5),
    # the same, of a scale that is off by 1/17
    (4, "nvfp4"): (3 / 17, 3 / 17),
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
    least = {(8, "companding"): (2 / 255) ** 2, (4, "mxfp4"): 1 / 6, (4, "nvfp4"): 0.09}
    some = wide > wide.max() * least.get(kind, 1 / 16) if which else wide < np.inf
    if which == 0:  # where nothing is clipped
        held = {(8, "mxfp8"): 0.87, (4, "nvfp4"): 0.94}
        some = abs(wide) < held.get(kind, 2.0) * abs(wide).max()
        some &= wide > -0.88 * abs(wide).max()
    elif kind == (4, "nvfp4"):
        some &= wide < 0.94 * wide.max()
    # five standard deviations, and the rounding of the scale and the sums
    assert (abs(got.mean(0) - wide) <= 5 * off + 1e-6 * abs(wide).max())[some].all()
    assert some.any()


microscaled = pytest.mark.parametrize(
    "kind", numpy_side.MICROSCALED, ids=lambda kind: kind[1]
)


@microscaled
@pytest.mark.parametrize("which", [0, 1])
def test_microscaling_is_that_of_the_formats(kind, which):
    """To the bit: ties, ranges, what is clipped, blocks of zeros."""
    fmt, _, block = FORMATS[kind][which], *FORMATS[kind][1:]
    x = np.array(moment(which, (64, 256), spread=4.0))
    x[0, :64], x[1] = 0, 2.0 ** np.round(np.log2(abs(x[1])))
    x[2] *= 2.0 ** -np.arange(256)[::-1] if kind[1] != "nvfp4" else 1
    x[3:5] = np.arange(512).reshape(2, 256) / 4  # halfway between numbers
    x[5] *= 1e30 if kind[1] != "nvfp4" else 1
    code = jax.jit(lambda x: pack(fmt, block, x))(x)
    got = np.float64(unpack(fmt, code)).reshape(-1, block)
    blocks = np.float64(x).reshape(-1, block)
    want = numpy_side.MICROSCALED[kind][which](blocks)
    some = abs(blocks).max(-1) > 1e-30  # else the scale has its smallest value
    if which:
        assert (got[some] > 0).all()
    # a division in float32 is on another side of a tie than one in float64
    same = np.isclose(got, want, rtol=1e-6)[some]
    assert same.mean() > (0.999 if kind[1] == "nvfp4" else 0.99999)
    assert np.abs(got[~some]).max() <= 1e-20 if kind[1] != "nvfp4" else True


# of both moments: stochastically, by all of the gap next to the largest
WIDEST = {
    (8, "mxfp8"): (1 / 8, 1 / 4),
    (4, "mxfp4"): (1 / 2, 1 / 2),
    (4, "nvfp4"): (3 / 17, 3 / 17),
}


@microscaled
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_microscaled_moments_beside_those_of_adam(kind, dtype):
    """Each step adds the error of one rounding, and earlier ones decay."""
    how = LowBit(kind[0], code=kind[1], least_size=0)
    tx, wide = scale_by_adam(bits=how), scale_by_adam(bits=32)
    sizes = moment(1, (16, 96))
    state, theirs = tx.init(sizes), wide.init(sizes)
    block, formats = FORMATS[kind][2], FORMATS[kind]
    bounds = [np.zeros(sizes.shape), np.zeros(sizes.shape)]
    for key in jax.random.split(jax.random.key(0), 20):
        g = (sizes * jax.random.normal(key, sizes.shape)).astype(dtype)
        old = [unpack(f, x) for f, x in zip(formats[:2], state[1:], strict=True)]
        u, state = tx.update(g, state)
        _, theirs = wide.update(g, theirs)
        assert u.dtype == dtype and np.isfinite(np.asarray(u, np.float32)).all()
        for i, (b, e) in enumerate(zip((0.9, 0.999), WIDEST[kind], strict=True)):
            new = b * np.float64(old[i]) + (1 - b) * np.float64(g) ** (i + 1)
            top = abs(new).reshape(16, -1, block).max(-1, keepdims=True)
            top = np.broadcast_to(top, (16, 96 // block, block)).reshape(16, 96)
            bounds[i] = b * bounds[i] + e * top * (1 + 8 * FLOAT32)
            error = abs(np.float64(unpack(formats[i], state[1 + i])) - theirs[1 + i])
            assert (error <= bounds[i] + 1e-6 * top).all()


@pytest.mark.parametrize("kind", [(8, "mxfp8"), (4, "mxfp4")], ids=str)
def test_a_second_moment_grows_to_the_mean_square(kind):
    """By less than half of what its numbers are apart, where b2 is near 1."""
    tx = scale_by_adam(b2=0.999, bits=LowBit(kind[0], code=kind[1], least_size=0))
    g = jax.random.normal(jax.random.key(0), (2000, 8, 128))
    step = lambda state, g: (tx.update(g, state)[1], None)
    state = jax.lax.scan(step, tx.init(g[0]), g)[0]
    root = jnp.sqrt(unpack(FORMATS[kind][1], state.nu).mean() / (1 - 0.999**2000))
    assert root == pytest.approx(1, rel=0.05)


@kinds
def test_a_first_moment_falls_without_gradients(kind):
    """By a tenth a step, which is less than half of what some numbers are apart."""
    how = LowBit(kind[0], code=kind[1], least_size=0)
    tx, g = scale_by_adam(b1=0.9, bits=how), moment(0, (256, 64), spread=1.0)
    _, state = tx.update(g, tx.init(g))
    step = lambda state, _: (tx.update(jnp.zeros_like(g), state)[1], None)
    fallen = jax.lax.scan(step, state, None, 20)[0]
    sizes = lambda s: float(jnp.abs(unpack(FORMATS[kind][0], s.mu)).mean())
    # small ones may be lost; a rounding leaves others 1/5 too large at most
    assert 0 < sizes(fallen) / sizes(state) < 1.2 * 0.9**20


@microscaled
def test_microscaling_under_vmap_and_in_a_scan(kind):
    """Of a stack of updates: each alone, to the bit."""
    how = LowBit(kind[0], code=kind[1], least_size=0, stochastic=False)
    tx = scale_by_adam(bits=how)
    g = moment(0, (3, 16, 64))
    each = [tx.update(x, tx.init(x)) for x in g]
    want = jax.tree.map(lambda *x: jnp.stack(x), *each)
    over = jax.vmap(lambda x: tx.update(x, tx.init(x)))(g)
    _, scanned = jax.lax.scan(lambda _, x: (0, tx.update(x, tx.init(x))), 0, g)
    for got in (over, scanned):
        chex.assert_trees_all_equal(got[1], want[1])
        chex.assert_trees_all_close(got[0], want[0], rtol=4 * FLOAT32)


def test_microscaled_leaves_that_no_block_divides():
    p = {"odd": jnp.ones((512, 24)), "none": jnp.ones((0, 64)), "one": jnp.ones(())}
    for bits, code in numpy_side.MICROSCALED:
        tx = scale_by_adam(bits=LowBit(bits, code=code, least_size=0))
        _, state = jax.jit(tx.update)(p, tx.init(p))
        chex.assert_trees_all_equal_dtypes(state.mu, p)


def test_bytes_of_a_parameter():
    p = jax.ShapeDtypeStruct((64, 1024), jnp.float32)
    wanted = {
        8: 2 + 4 / 32,
        LowBit(8, code="dynamic"): 2 + 8 / 256,
        LowBit(8, code="float8"): 2 + 8 / 128,
        4: 1 + 8 / 128,
        32: 8,
        LowBit(8, block=64): 2 + 4 / 64,
        LowBit(8, code="mxfp8"): 2 * 1.03125,
        LowBit(4, code="mxfp4"): 2 * 0.53125,
        LowBit(4, code="nvfp4"): 2 * (0.5625 + 4 / p.size),
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


@pytest.mark.parametrize("bits, code", [(8, None), *numpy_side.MICROSCALED])
def test_a_stack_is_its_layers(bits, code):
    """To the bit: nothing goes from one layer to another."""
    how = LowBit(bits, code=code, least_size=0, stochastic=False)
    tx = adam(1e-2, bits=how)
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
    with pytest.raises(ValueError, match="'mxfp8': with bits=4 'dynamic' or 'mxfp4'"):
        LowBit(4, code="mxfp8")
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
    others = LowBit(8, code="dynamic", block=32), LowBit(8, code="mxfp8")
    for state in (of(4), of(32), *map(of, others)):
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


@pytest.mark.parametrize("code", [None, "nvfp4"])
def test_sharding(code):
    """Codes and scales as the parameter; a block that a shard cuts is refused."""
    p = {"w": placed((32, 256), None, "data"), "layers": placed((8, 32, 32), "data")}
    tx = scale_by_adam(bits=LowBit(4, code=code, block=32))
    start = tx.init(p)
    _, after = jax.jit(tx.update)(p, start)
    for state in (start, after):
        for leaf, given in ((k, p[k]) for k in p):
            for x in jax.tree.leaves((state.mu[leaf], state.nu[leaf])):
                cut = P(*given.sharding.spec[: x.ndim])
                place = NamedSharding(given.sharding.mesh, cut)
                assert x.sharding.is_equivalent_to(place, x.ndim)
    there = jax.tree.map(lambda x: jnp.ones(x.shape), p)
    _, want = jax.jit(tx.update)(there, tx.init(there))
    chex.assert_trees_all_equal(*map(jax.device_get, (after, want)))
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
            for how in (LowBit(8, code="dynamic"), LowBit(4), LowBit(4, code="mxfp4"))
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
@pytest.mark.parametrize("code", ["companding", "float8", "mxfp8"])
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


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@kinds
def test_a_block_with_what_is_not_finite_is_not_finite(kind, bad):
    """It alone; on a CPU, too, whose maximum leaves NaN out."""
    for which in (0, 1):
        x = moment(which, (4, 256)).at[1, 70].set(bad)
        found = np.isfinite(stored(kind, which, x))
        assert not found[1, 70] and found.sum() >= 4 * 256 - 64
        assert found[1, :64].all()
