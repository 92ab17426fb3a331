"""Activation kernels against their plain references, and the ops that stand on them."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
from jax import export
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxmem
from jaxmem import ops
from jaxmem.memory import target_mesh
from jaxmem.ops.activations import gelu as _gelu
from jaxmem.ops.activations import kernels as wiring
from jaxmem.ops.activations.silu import FORMS, SILU, value_and_slope
from jaxmem.ops.few_bit.tables import shipped
from pallas_kernels import dispatch, lowering, simulated
from pallas_kernels.activation import gpu as activation_gpu
from pallas_kernels.activation import reference
from pallas_kernels.activation import tpu as activation_tpu
from tests.arrays import array
from tests.references import kept_bytes

AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
MODULES = {"tpu": activation_tpu, "cuda": activation_gpu}
TARGETS = {"tpu": "tpu-v5e", "cuda": "h100"}
PLATFORM = pytest.mark.parametrize("platform", MODULES)
CHIPS = [
    pytest.param(
        t, marks=pytest.mark.skipif(t not in AVAILABLE, reason="targets extra")
    )
    for t in TARGETS.values()
]
TARGET = pytest.mark.parametrize("target", CHIPS)
# |derivative error| that the ops state for save="output", by dtype
STATED = {"float32": 1e-4, "float16": 0.0075, "bfloat16": 0.016}
BOTH = {
    "gelu_tanh": (_gelu.TANH, _gelu.gelu_tanh),
    "gelu_erf": (_gelu.ERF, wiring.gelu_erf),
    "silu": (SILU, value_and_slope),
}


def gelu_erf(x, **how):
    return ops.gelu(x, approximate=False, **how)


def draw(shape, dtype, seed=0):
    return array(3 * np.random.default_rng(seed).standard_normal(shape), dtype)


def float64(x):
    return np.asarray(x.astype(jnp.float32), "f8")


def assert_near(got, want, ulps=2):
    """Equal up to rounding of the same formula: XLA orders and fuses it differently."""
    assert got.dtype == want.dtype and got.shape == want.shape
    top = max(1.0, np.max(np.abs(float64(want)), initial=0))
    allowed = ulps * float(jnp.finfo(want.dtype).eps) * top
    assert np.max(np.abs(float64(got) - float64(want)), initial=0) <= allowed


# -- the kernels, simulated with poisoned memory, against their plain references


def every_function(module, x, g):
    """What each function of a module gives, and nothing of what is packed."""
    step = lambda x: (x >= -1.0).astype(jnp.int32) + (x >= 0.5).astype(jnp.int32)
    level = lambda code: jnp.where(code == 2, 1.5, jnp.where(code == 1, 0.5, -0.25))
    side = lambda x: (x >= 0.0).astype(jnp.int32)
    mirrored = lambda code, y: jnp.where(code != 0, y, -2 * y)
    value = lambda x: x * jax.nn.sigmoid(x)
    y, codes = module.forward(x, value=value, code=step, bits=2)
    same, sides = module.forward(x, value=value, code=side, bits=1)
    dx = module.backward(g, codes, slope=level)
    recomputed = module.backward(g, sides, y, slope=mirrored)
    return y, same, dx, recomputed


CASES = [("tpu", (264, 130), "bfloat16"), ("cuda", (35, 384), "bfloat16")]
MORE = [
    *(("tpu", shape, "float32") for shape in [(), (1100,), (3, 5, 13), (33, 7)]),
    *(("tpu", (2, 40, 200), "float32"), ("cuda", (2, 4, 1024), "float32")),
    *(("tpu", shape, "bfloat16") for shape in [(4, 6, 40), (2, 2, 300, 24)]),
    *(("cuda", shape, "float32") for shape in [(3, 33, 128), (40, 1152)]),
    *(("cuda", shape, "float16") for shape in [(2, 4, 128), (8192,), (40, 1024)]),
]


@pytest.mark.parametrize(
    "platform, shape, dtype",
    [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
)
def test_equals_the_plain_reference(platform, shape, dtype):
    args = [draw(shape, dtype, seed) for seed in range(2)]
    with simulated(platform):
        run = functools.partial(every_function, MODULES[platform])
        got = jax.jit(run)(*args)
    want = jax.jit(functools.partial(every_function, reference))(*args)
    for ours, theirs in zip(got, want, strict=True):
        assert_near(ours, theirs)


@PLATFORM
def test_packs_as_the_plain_reference_does(platform):
    """So that a pass may be a kernel and the other XLA."""
    x = draw({"tpu": (2, 40, 130), "cuda": (2, 35, 128)}[platform], "float32")
    code = lambda x: jnp.where(x >= 0, jnp.where(x >= 1, 2, 1), 0).astype(jnp.int32)
    run = lambda module: jax.jit(
        lambda x: module.forward(x, value=jnp.abs, code=code, bits=2)[1]
    )
    with simulated(platform):
        got = run(MODULES[platform])(x)
    np.testing.assert_array_equal(got, run(reference)(x))


@pytest.mark.slow
@PLATFORM
def test_blocks_may_be_chosen(platform):
    """Blocks of another size give the same; several of them, and a ragged last one."""
    block = {"tpu": (1, 256, 128), "cuda": 256}[platform]
    width = {"tpu": 200, "cuda": 1024}[platform]
    x, g = (draw((264, width), "float32", seed) for seed in range(2))
    module = MODULES[platform]

    class Blocked:
        pass

    for name in ("forward", "backward"):
        run = functools.partial(getattr(module, name), block=block)
        setattr(Blocked, name, staticmethod(run))
    with simulated(platform):
        got = jax.jit(functools.partial(every_function, Blocked))(x, g)
    want = jax.jit(functools.partial(every_function, reference))(x, g)
    for ours, theirs in zip(got, want, strict=True):
        assert_near(ours, theirs)


@pytest.mark.slow
@PLATFORM
def test_under_x64(platform):
    code = lambda x: (x >= 0).astype(jnp.int32)
    slope = lambda code: jnp.where(code != 0, 1.0, -1.0)

    def run(module, x):
        y, packed = module.forward(x, value=jnp.abs, code=code, bits=1)
        return module.backward(y, packed, slope=slope)

    with jax.enable_x64(True):
        x = draw((64, 128), "float32")
        with simulated(platform):
            got = jax.jit(functools.partial(run, MODULES[platform]))(x)
        assert_near(got, run(reference, x))


# -- the formulas that kernels take, in float32, against float64


def exact(name, x):
    """Value and derivative in float64."""
    if name == "silu":
        s = scipy.special.expit(x)
        return x * s, s * (1 + x * (1 - s))
    if name == "gelu_erf":
        cdf = scipy.special.ndtr(x)
        return x * cdf, cdf + x * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
    inner = np.sqrt(8 / np.pi) * x * (1 + 0.044715 * x * x)
    s = scipy.special.expit(inner)
    slope = np.sqrt(8 / np.pi) * (1 + 3 * 0.044715 * x * x)
    return x * s, s + x * s * (1 - s) * slope


@pytest.mark.parametrize("name", BOTH)
def test_value_and_slope(name):
    x = np.linspace(-12, 12, 200_001, dtype="f4")
    value, slope = jax.jit(BOTH[name][1])(x)
    want = exact(name, x.astype("f8"))
    np.testing.assert_allclose(value, want[0], rtol=1e-6, atol=2e-7)
    np.testing.assert_allclose(slope, want[1], rtol=1e-6, atol=3e-6)


@pytest.mark.parametrize("name", BOTH)
def test_far_away_nothing_overflows(name):
    x = jnp.asarray([-3e38, -1e5, 1e5, 3e38, jnp.inf, jnp.nan], "f4")
    value, slope = BOTH[name][1](x)
    assert np.isnan(value[-1]) and np.isnan(slope[-1])
    np.testing.assert_array_equal(value[:-1], np.maximum(x[:-1], 0))
    np.testing.assert_array_equal(slope[:-1], (x[:-1] > 0).astype("f4"))


def test_normal_distribution_is_as_near_as_stated():
    x = np.linspace(-13, 13, 400_001, dtype="f4")
    want = scipy.special.ndtr(x.astype("f8"))
    near = np.abs(x) > 1e-3
    got = np.asarray(jax.jit(wiring.gelu_erf)(x)[0], "f8")[near] / x[near]
    error = np.abs(got - want[near])
    assert np.max(error) < 2e-7 + 2**-24  # of the product's own rounding
    assert np.max((error / want[near])[x[near] > -5]) < 8e-7 + 2**-24


@pytest.mark.fast(
    "gelu_tanh-float32",
    "gelu_tanh-float16",
    "gelu_erf-float32",
    "gelu_erf-bfloat16",
    "silu-float32",
)
@pytest.mark.parametrize("dtype", STATED)
@pytest.mark.parametrize("name", BOTH)
def test_derivative_from_the_output_is_as_near_as_stated(name, dtype):
    unimodal, both = BOTH[name]
    x = jnp.asarray(np.linspace(-12, 12, 200_001), dtype)
    op = wiring._kernel_forms("gelu", None, _lean(name), unimodal, both).op("output")
    y, pull = jax.vjp(jax.jit(op), x)
    (dx,) = pull(jnp.ones_like(x))
    value, slope = exact(name, float64(x))
    eps = float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(float64(y), value, rtol=eps, atol=max(2e-7, eps**2))
    error = np.max(np.abs(float64(dx) - slope))
    assert error <= STATED[dtype] + eps  # the derivative is rounded once more


def _lean(name):
    return {
        "gelu_tanh": _gelu.FORMS[True],
        "gelu_erf": _gelu.FORMS[False],
        "silu": FORMS,
    }[name]


def slow_from(least, bits):
    """The numbers of bits; tables of more than 4 are solved, 8 in seconds."""
    slow = pytest.mark.slow
    return [b if b < least else pytest.param(b, marks=slow) for b in bits]


@pytest.mark.parametrize("bits", slow_from(6, range(1, 9)))
def test_codes_are_those_of_the_lean_op(bits):
    kernel = wiring.of_code(jnp.abs, *shipped("silu", bits))
    assert kernel.bits == bits
    x = jnp.concatenate(
        [draw((4000,), "float32"), jnp.asarray(shipped("silu", bits)[0])]
    )
    slope = jax.jit(lambda x: kernel.slope(kernel.code(x)))(x)
    want = jax.jit(jax.grad(lambda x: jnp.sum(ops.silu(x, save=bits))))(x)
    np.testing.assert_array_equal(slope, want)


@pytest.mark.parametrize("bits", slow_from(6, [5, 6, 7, 8]))
@PLATFORM
def test_codes_of_many_bits_are_those_of_the_reference(platform, bits):
    """To the bit: on each border, next to it, between them, and beyond all."""
    rng = np.random.default_rng(bits)
    borders = np.sort(rng.normal(size=2**bits - 1)).astype("f4")
    levels = rng.normal(size=2**bits).astype("f4")
    kernel = wiring.of_code(jnp.abs, borders.tolist(), levels.tolist())
    assert kernel.bits == bits
    below = np.nextafter(borders, np.float32(-np.inf))
    far = np.asarray([-1e30, -np.inf, 1e30, np.inf], "f4")
    between = rng.normal(size=3068 - 2 * len(borders)).astype("f4")
    x = np.concatenate([borders, below, far, between])
    g = rng.normal(size=x.size).astype("f4")

    def run(module, x, g):
        how = {"value": kernel.value, "code": kernel.code, "bits": bits}
        y, packed = module.forward(x, **how)
        return y, packed, module.backward(g, packed, slope=kernel.slope)

    with simulated(platform):
        y, packed, dx = jax.jit(functools.partial(run, MODULES[platform]))(x, g)
    np.testing.assert_array_equal(y, np.abs(x))
    code = np.searchsorted(borders, x, side="right")
    np.testing.assert_array_equal(dx, levels[code] * g)
    if platform == "tpu":
        np.testing.assert_array_equal(
            packed, run(reference, *map(jnp.asarray, (x, g)))[1]
        )


# -- the ops, end to end


OPS = {
    "gelu": ops.gelu,
    "gelu_erf": gelu_erf,
    "silu": ops.silu,
}


def value_and_pull(op, implementation, args, g):
    run = functools.partial(op, implementation=implementation)

    def both(args, g):
        y, pull = jax.vjp(run, *args)
        return y, *pull(g)

    return jax.jit(both)(args, g)


@pytest.mark.parametrize(
    "platform, name, save, dtype",
    [
        ("tpu", "gelu_erf", "output", "float32"),
        ("cuda", "silu", 3, "bfloat16"),
        pytest.param("cuda", "gelu", "output", "float32", marks=pytest.mark.slow),
        pytest.param("tpu", "silu", 4, "bfloat16", marks=pytest.mark.slow),
        pytest.param("tpu", "gelu", 1, "float32", marks=pytest.mark.slow),
        pytest.param("tpu", "gelu", 6, "bfloat16", marks=pytest.mark.slow),
        pytest.param("cuda", "silu", 5, "float32", marks=pytest.mark.slow),
        pytest.param("cuda", "gelu_erf", "output", "float16", marks=pytest.mark.slow),
    ],
)
def test_ops_equal_those_of_xla(platform, name, save, dtype):
    """The derivative from an output as rounded: off by what that costs, twice.

    In float32 its least bit moves the derivative by 1e-4 near the minimum.
    """
    op = functools.partial(OPS[name], save=save)
    shape = (24, {"tpu": 200, "cuda": 256}[platform])
    x, g = draw(shape, dtype), draw(shape, dtype, 2)
    with simulated(platform):
        got = value_and_pull(op, "pallas", (x,), g)
    want = map(float64, value_and_pull(op, "xla", (x,), g))
    stated = STATED[dtype] if save == "output" else 0
    slack = 2 * stated * np.max(np.abs(float64(g)))
    for i, (ours, theirs) in enumerate(zip(got, want, strict=True)):
        allowed = 4 * float(jnp.finfo(dtype).eps) * np.max(np.abs(theirs))
        allowed += slack if i else 0
        assert np.max(np.abs(float64(ours) - theirs)) <= allowed


@pytest.mark.fast(
    "shape0-gelu-output-2.125",
    "shape0-gelu_erf-2-0.25",
    "shape1-silu-output-2.125",
    "shape1-gelu-3-0.375",
)
@pytest.mark.parametrize(
    "name, save, each",
    [("gelu", "output", 2 + 1 / 8), ("silu", "output", 2 + 1 / 8)]
    + [("gelu_erf", 2, 2 / 8), ("gelu", 3, 3 / 8), ("silu", 5, 5 / 8)],
)
@pytest.mark.parametrize("shape", [(64, 256), (2, 40, 24)])
def test_keeps_what_the_op_says(name, save, each, shape):
    op = functools.partial(OPS[name], save=save)
    x = draw(shape, "bfloat16")
    for how in ("xla", "pallas"):
        run = functools.partial(op, implementation=how)
        assert kept_bytes(run, (x,), {0}) == each * x.size


def test_keeps_no_second_output_for_the_next_matmul():
    """In a scan over layers: their input, one output of the activation, the bits."""
    v, w = (draw((3, 128, 128), "bfloat16", seed) for seed in range(2))

    def layers(how, x, v, w):
        def layer(x, weights):
            v, w = weights
            return ops.gelu(x @ v, save="output", implementation=how) @ w, None

        return jax.lax.scan(layer, x, (v, w))[0]

    x = draw((64, 128), "bfloat16")
    n = 3 * x.size
    for how in ("xla", "pallas"):
        total = kept_bytes(functools.partial(layers, how), (x, v, w), {1, 2})
        assert total == 2 * n + 2 * n + n // 8


# -- second derivatives


def curved(op, implementation, *args):
    """The gradient of the squared gradient of a sum of cubes."""
    fn = lambda *args: jnp.sum(op(*args, implementation=implementation) ** 3)
    dot = lambda *args: sum(jnp.sum(d * d) for d in grad(fn, args)(*args))
    grad = lambda fn, args: jax.grad(fn, tuple(range(len(args))))
    return grad(dot, args)(*args)


@pytest.mark.parametrize(
    "name, save, error",
    [
        ("silu", 3, 1e-5),
        # both invert rounded outputs: 1e-4 of a derivative each
        pytest.param("gelu", "output", 1e-3, marks=pytest.mark.slow),
        pytest.param("gelu_erf", "output", 1e-3, marks=pytest.mark.slow),
    ],
)
def test_second_derivatives_are_those_of_xla(name, save, error):
    """In float32, of the same formulas, as far as they are the largest of theirs."""
    op = functools.partial(OPS[name], save=save)
    x = draw((16, 128), "float32")
    # where the derivative of a recovered input is not near 0 / 0
    x = jnp.where(jnp.abs(x + 0.75) < 0.1, 0.0, x)
    lowering.warn_once.cache_clear()
    warns = pytest.warns(UserWarning, match="no second derivative; .* by XLA")
    with simulated("tpu"), warns:
        got = jax.jit(functools.partial(curved, op, "pallas"))(x)
    for ours, theirs in zip(got, curved(op, "xla", x), strict=True):
        top = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours, theirs, rtol=error, atol=error * top)


def test_the_second_derivative_of_gelu_at_zero():
    """Where the polynomial that stands in for `erfc` has none."""
    x = jnp.asarray([-1.5, -0.0, 0.0, 1e-30, 2.0])
    value = lambda x: wiring.gelu_erf(x)[0]
    bend = jax.vmap(jax.grad(jax.grad(value)))(x)
    want = np.exp(-0.5 * x * x) * (2 - x * x) / np.sqrt(2 * np.pi)
    np.testing.assert_allclose(bend, want, rtol=1e-5)


# -- refusals


def test_what_has_no_kernel_is_said():
    x = draw((8, 128), "float32")
    with pytest.raises(ValueError, match="save='input' has no kernel, as XLA fuses it"):
        ops.gelu(x, implementation="pallas")
    with pytest.raises(ValueError, match="TPU: 1 to 2..31 - 1 elements, not 0"):
        ops.silu(x[:0], save=2, implementation="pallas")
    with pytest.raises(ValueError, match="no kernel for the platform"):
        ops.silu(x, save=2, implementation="pallas")
    for shape in ((8, 100), (3, 128)):
        with pytest.raises(ValueError, match="GPU: rows of a multiple of 128 elements"):
            with simulated("cuda"):
                ops.silu(draw(shape, "float32"), save=2, implementation="pallas")


def test_dtypes_that_no_kernel_takes_are_refused():
    with jax.enable_x64(True):
        x = draw((8, 128), "float64")
        with pytest.raises(ValueError, match="float32 and bfloat16, not float64"):
            ops.gelu(x, save="output", implementation="pallas")
    half = draw((8, 128), "float16")
    with simulated("tpu"), pytest.raises(ValueError, match="bfloat16, not float16"):
        ops.silu(half, save=2, implementation="pallas")


def test_forward_mode_is_refused():
    x = draw((8, 128), "float32")
    op = functools.partial(ops.gelu, save="output", implementation="pallas")
    with simulated("tpu"), pytest.raises(TypeError, match="forward-mode"):
        jax.jit(lambda x: jax.jvp(op, (x,), (x,)))(x)


# -- where nobody asks for a kernel


def test_none_is_xla_where_nothing_was_measured():
    x = draw((8, 128), "float32")
    for how in ({}, {"implementation": None}, {"implementation": "xla"}):
        run = functools.partial(ops.gelu, save="output", **how)
        assert "custom_vjp" not in str(jax.make_jaxpr(run)(x))


def test_a_measured_kernel_leaves_the_rest_to_xla(monkeypatch):
    """None takes the kernel of one platform, and its reference everywhere else."""
    passes = (False, True)
    measured = (dispatch.Measured("gelu", "h100", "float32", 0, p) for p in passes)
    monkeypatch.setattr(dispatch, "MEASURED", tuple(measured))
    x, g = draw((33, 7), "float32"), draw((33, 7), "float32", 1)
    for save in ("output", 2):
        op = functools.partial(ops.gelu, save=save)
        got = value_and_pull(op, None, (x,), g)
        want = value_and_pull(op, "xla", (x,), g)
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6, atol=1e-6)
        np.testing.assert_allclose(got[1], want[1], rtol=1e-6, atol=5e-4)
    same = jax.make_jaxpr(functools.partial(ops.gelu, save="input"))(x)
    assert "custom_vjp" not in str(same)
    with jax.enable_x64(True):
        wide = jax.make_jaxpr(functools.partial(ops.gelu, save=2))(x.astype("float64"))
        assert "custom_vjp" not in str(wide)


def test_auto_chooses_among_kernels():
    """The output where the next matmul keeps it, else the code; both by kernels."""
    x, w = draw((16, 128), "float32"), draw((128, 128), "float32", 1)
    seen = []

    def mlp(v, x):
        h = ops.gelu(x @ w, save="auto", bits=2, implementation="pallas")
        return h @ v

    for wanted, word in (({0, 1}, "output"), ({1}, "2 bits")):
        auto = jaxmem.rewriting.auto_save(mlp, on_choice=seen.append)
        kept_bytes(auto, (w, x), wanted)
        assert word in str(seen[-1])


# -- compiled for chips that are not here


def trained(op):
    """Forward and backward pass in one program; gives the cotangent, and y."""

    def step(g, x):
        y, pull = jax.vjp(functools.partial(op, implementation="pallas"), x)
        # what is written over the cotangent comes first: a donated array becomes the
        # first result of its shape
        # and the cotangent is made of y: a backward pass comes after its forward pass
        return (*pull(g * y), y)

    return step


COMPILED = [("gelu_erf", "output"), ("silu", 3)]


def check_in_place(target, name, save, shape, dtype):
    """Nothing is allocated beyond results and what is kept, nor copied."""
    step = trained(functools.partial(OPS[name], save=save))
    args = [jax.ShapeDtypeStruct(shape, dtype)] * 2
    report = jaxmem.estimate(jax.jit(step), *args, target=target, donate_argnums=0)
    n, size = math.prod(shape), jnp.dtype(dtype).itemsize
    bits = 1 if save == "output" else save
    assert report.temp_bytes <= n * bits / 8 + 2**16  # the output is a result
    assert report.alias_bytes >= n * size


@pytest.mark.parametrize(
    "target",
    [
        CHIPS[0],
        pytest.param(*CHIPS[1].values, marks=[*CHIPS[1].marks, pytest.mark.slow]),
    ],
)
@pytest.mark.parametrize(
    "name, save",
    [COMPILED[0], pytest.param(*COMPILED[1], marks=pytest.mark.slow)],
    ids=str,
)
def test_gradients_take_the_place_of_cotangents(target, name, save):
    with jax.enable_x64(True):  # so that no index is an int64 unawares
        check_in_place(target, name, save, (1024, 1024), "bfloat16")


@pytest.mark.slow
@TARGET
@pytest.mark.parametrize("shape", [(4, 197, 768), (300, 640)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name, save", [*COMPILED, ("gelu", 1)])
def test_in_place_in_any_shape_and_dtype(target, name, save, dtype, shape):
    check_in_place(target, name, save, shape, dtype)


def in_scan(loss, stacked):
    return jax.lax.scan(lambda s, x: (s + loss(x), None), jnp.float32(0), stacked)[0]


def in_vmap(loss, stacked):
    return jnp.sum(jax.vmap(loss)(stacked))


def in_remat(loss, stacked):
    return in_scan(jax.checkpoint(loss), stacked)


def loss(x):
    h = ops.gelu(x, save="output", implementation="pallas")
    return jnp.sum(ops.silu(h, save=2, implementation="pallas"))


@pytest.mark.slow
@TARGET
@pytest.mark.parametrize(
    "around, rows, x64",
    [(in_scan, 64, True), (in_vmap, 64, False), (in_vmap, 50, True)]
    + [(in_remat, 64, False)],
)
def test_compiles_under_transformations(target, around, rows, x64):
    with jax.enable_x64(x64):
        x = jax.ShapeDtypeStruct((4, rows, 256), jnp.float32)
        step = jax.jit(jax.grad(functools.partial(around, loss)))
        assert jaxmem.estimate(step, x, target=target).peak_bytes > 0


def in_shards(mesh, x):
    spec = PartitionSpec("x")
    shards = jax.shard_map(
        lambda x: loss(x)[None], mesh=mesh, in_specs=spec, out_specs=spec
    )
    return jnp.sum(shards(x))


@pytest.mark.slow
@pytest.mark.skipif("tpu-v5e" not in AVAILABLE, reason="targets extra")
def test_shard_map_compiles_for_tpu():
    mesh = target_mesh("tpu-v5e", (4,), ("x",))
    sharding = NamedSharding(mesh, PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((4, 64, 256), jnp.float32, sharding=sharding)
    step = jax.jit(jax.grad(functools.partial(in_shards, mesh)))
    assert jaxmem.estimate(step, x, target="tpu-v5e").argument_bytes < 4 * x.size


@pytest.mark.slow
def test_shard_map_lowers_for_gpu():
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,))
    step = jax.jit(jax.grad(functools.partial(in_shards, mesh)))
    x = jax.ShapeDtypeStruct((4, 64, 256), jnp.float32)
    allowed = export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")
    exported = export.export(step, platforms=["cuda"], disabled_checks=[allowed])(x)
    assert "mosaic_gpu" in exported.mlir_module()


@pytest.mark.slow
@pytest.mark.skipif("tpu-v5e" not in AVAILABLE, reason="targets extra")
def test_sharded_jit_without_shard_map_says_so():
    sharding = NamedSharding(target_mesh("tpu-v5e", (4,), ("x",)), PartitionSpec("x"))
    x = jax.ShapeDtypeStruct((4, 64, 256), jnp.float32, sharding=sharding)
    with pytest.raises(NotImplementedError, match="shard_map"):
        jaxmem.estimate(jax.jit(jax.grad(loss)), x, target="tpu-v5e")
