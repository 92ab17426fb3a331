"""The norm kernels, simulated, against their XLA references; their programs compiled.

Values go through the public ops. The bound is that of `tests/references.py`: four
roundings of the largest element and twice the reference's own error, against the
reference in float64.
"""

import contextlib
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxmem
import pallas_kernels
from jaxmem import ops
from jaxmem.ops.randomness.bits import seed_words
from pallas_kernels import dispatch, lowering
from pallas_kernels.norm import NormRules
from pallas_kernels.norm import gpu as norm_gpu
from pallas_kernels.norm import tpu as norm_tpu
from tests import references
from tests.arrays import array
from tests.kernels.meshes import chip_mesh
from tests.sets import some_fast

AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
TARGETS = {"tpu": "tpu-v5e", "cuda": "h100"}
MODULES = {"tpu": norm_tpu, "cuda": norm_gpu}
BOTH = pytest.mark.parametrize("platform", TARGETS)
KEY = jax.random.key(5)
NAMES = ("layer_norm", "rms_norm", "dropout_add_layer_norm", "dropout_add_rms_norm")


@contextlib.contextmanager
def simulated(platform):
    """Jitted in there, and done before it ends."""
    with pallas_kernels.simulated(platform):
        yield lambda fn, *args: jax.block_until_ready(jax.jit(fn)(*args))


def _draw(seed, shape, dtype="float32"):
    return array(np.random.default_rng(seed).standard_normal(shape), dtype)


def _arguments(shape, dtype, *, sums: bool, count: int, residual=None):
    """x, the residual where there is a sum, and `count` of scale and bias."""
    x, other = _draw(0, shape, dtype), _draw(1, shape, residual or dtype)
    scale, bias = 1 + _draw(2, shape[-1]) / 4, _draw(3, shape[-1])
    return x, *(other,) * sums, *(scale, bias)[:count]


def _vjp(op, args):
    """The op's outputs and gradients for one cotangent."""
    out, pull = jax.vjp(op, *args)
    ct = jax.tree.map(lambda y: _draw(7, y.shape).astype(y.dtype), out)
    return out, pull(ct)


def _reference(op, args):
    with jax.enable_x64(True):
        wide = [jnp.asarray(np.asarray(a.astype("float32"), "f8")) for a in args]
        return jax.tree.map(np.asarray, jax.jit(lambda *a: _vjp(op, a))(*wide))


def _assert_close(got, plain_result, reference, dtype):
    names = [f"leaf {i}" for i in range(len(jax.tree.leaves(got)))]
    leaves = map(jax.tree.leaves, (got, plain_result, reference))
    for what, a, b, want in zip(names, *leaves, strict=True):
        references._assert_close(what, a, b, want, dtype, 0.0)


def check(platform, op, args, dtype):
    plain = functools.partial(op, implementation="xla")
    with simulated(platform) as run:
        lean = functools.partial(op, implementation="pallas")
        got = run(lambda *a: _vjp(lean, a), *args)
    plain_result = jax.jit(lambda *a: _vjp(plain, a))(*args)
    _assert_close(got, plain_result, _reference(plain, args), dtype)


def _dropping(op, rate=0.3, **options):
    return functools.partial(op, rate=rate, rng=KEY, **options)


CASES = {
    "dropout layer": (
        _dropping(ops.dropout_add_layer_norm),
        {"sums": True, "count": 2},
        "float32",
    ),
}
SLOW_CASES = {
    "rms output": (
        functools.partial(ops.rms_norm, save="output"),
        {"sums": False, "count": 1},
        "float32",
    ),
    "layer": (ops.layer_norm, {"sums": False, "count": 2}, "bfloat16"),
    "layer float32": (ops.layer_norm, {"sums": False, "count": 2}, "float32"),
    "layer output": (
        functools.partial(ops.layer_norm, save="output"),
        {"sums": False, "count": 2},
        "bfloat16",
    ),
    "layer alone": (ops.layer_norm, {"sums": False, "count": 0}, "bfloat16"),
    "layer to float32": (
        functools.partial(ops.layer_norm, dtype=jnp.float32),
        {"sums": False, "count": 1},
        "bfloat16",
    ),
    "rms": (ops.rms_norm, {"sums": False, "count": 1}, "bfloat16"),
    "dropout layer bfloat16": (
        _dropping(ops.dropout_add_layer_norm),
        {"sums": True, "count": 2},
        "bfloat16",
    ),
    "dropout layer, wide stream": (
        _dropping(ops.dropout_add_layer_norm),
        {"sums": True, "count": 2, "residual": "float32"},
        "bfloat16",
    ),
    "dropout layer output": (
        _dropping(ops.dropout_add_layer_norm, save="output"),
        {"sums": True, "count": 2},
        "bfloat16",
    ),
    "dropout rms": (
        _dropping(ops.dropout_add_rms_norm),
        {"sums": True, "count": 1},
        "bfloat16",
    ),
    "sum and rms": (
        _dropping(ops.dropout_add_rms_norm, rate=0.0),
        {"sums": True, "count": 0},
        "float32",
    ),
}
WIDTHS = {"tpu": 150, "cuda": 384}


@BOTH
@pytest.mark.parametrize("case", CASES)
def test_equals_reference(platform, case):
    op, kinds, dtype = CASES[case]
    args = _arguments((3, 5, WIDTHS[platform]), dtype, **kinds)
    check(platform, op, args, dtype)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("case", SLOW_CASES)
def test_every_option_equals_reference(platform, case):
    op, kinds, dtype = SLOW_CASES[case]
    args = _arguments((3, 5, WIDTHS[platform]), dtype, **kinds)
    check(platform, op, args, dtype)


@pytest.mark.slow
def test_float16_on_gpu():
    args = _arguments((7, 128), "float16", sums=True, count=2)
    check("cuda", _dropping(ops.dropout_add_layer_norm), args, "float16")


SHAPES = [  # blocks and slabs that rows do not fill; several rows a program
    ("tpu", 40, 5000, 32, True),
    ("cuda", 11, 128, 3, True),
    pytest.param("tpu", 300, 130, 128, False, marks=pytest.mark.slow),
    pytest.param("cuda", 5, 4224, 2, False, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("platform, rows, width, block, x64", SHAPES)
def test_blocks_that_rows_do_not_fill(platform, rows, width, block, x64):
    """Everything at once, by the kernel's own functions, in blocks of a given size."""
    kernels, rules = MODULES[platform], NormRules(1e-6, True, 0.3)
    x, residual, scale, bias = _arguments((rows, width), "float32", sums=True, count=2)
    g, g_total = _draw(5, x.shape), _draw(6, x.shape)
    seed = seed_words(KEY)
    outs = dict.fromkeys(("x", "residual", "scale", "bias"), jnp.float32)

    def both(x, residual, g, g_total):
        some = {"rules": rules, "block": block}
        common = {"seed": seed, "scale": scale}
        inputs = common | {"x": x, "residual": residual, "bias": bias}
        new = kernels.forward(inputs, dtype=jnp.float32, stats=True, **some)
        back = common | {"g": g, "g_total": g_total}
        old = kernels.backward(back | {"saved": new["total"]}, outs=outs, **some)
        mean, var = (new.pop(name) for name in ("mean", "var"))
        shift, inverse = bias, 1 / scale
        recomputed = kernels.backward(
            back | {"saved": new["y"]}, (var, shift, inverse), outs=outs, **some
        )
        return new, mean, var, old, recomputed

    with jax.enable_x64(x64), simulated(platform) as run:
        new, mean, var, old, recomputed = run(both, x, residual, g, g_total)
    plain = lambda x, r, s, b: ops.dropout_add_layer_norm(
        x, r, s, b, rate=0.3, rng=KEY, implementation="xla"
    )

    @jax.jit
    def pulled(g, g_total, *args):
        outs, pull = jax.vjp(plain, *args)
        return outs, pull((g, g_total))

    (y, total), wanted = pulled(g, g_total, x, residual, scale, bias)
    np.testing.assert_array_equal(new["total"], total)
    # sums of `width` and of `rows` float32 numbers of size 1, in another order
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    close(new["y"], y)
    close(mean, total.mean(-1))
    close(var, total.var(-1))
    for name, want in zip(outs, wanted, strict=True):
        close(old[name], want)
        # the division by a scale near zero costs digits
        close(recomputed[name], want, rtol=2e-3, atol=2e-3)


def test_programs_of_a_gpu_share_sums(monkeypatch):
    """Five programs add to two sums, which is all that they return; so do simulated
    ones where `can_take_turns`."""
    monkeypatch.setattr(norm_gpu, "shared_sums", lambda width: 2)
    x, scale = _arguments((11, 128), "float32", sums=False, count=1)
    g, outs = _draw(5, x.shape), dict.fromkeys(("scale", "bias"), jnp.float32)

    def both(x, g):
        arrays = {"g": g, "saved": x, "scale": scale}
        rules = NormRules(1e-6, True)
        return norm_gpu.backward(arrays, rules=rules, outs=outs, block=5)

    equations = jax.make_jaxpr(both)(x, g).eqns
    sums = {v.aval.shape for equation in equations for v in equation.outvars}
    assert (2, 128) in sums and (5, 128) not in sums
    with simulated("cuda") as run:
        got = run(both, x, g)
    norm = lambda s, b: ops.layer_norm(x, s, b, implementation="xla")
    want = dict(zip(outs, jax.vjp(norm, scale, jnp.zeros(128))[1](g), strict=True))
    # sums of 11 float32 numbers of size 1, in another order
    close = functools.partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-5)
    jax.tree.map(close, got, want)


def test_as_many_programs_as_run_at_once():
    """A row for each of a few programs; never more than an H100 holds."""
    assert norm_gpu.programs(7, 4096, 1) == 7
    of = functools.partial(norm_gpu.programs, 2**20)
    assert [of(width, 1) // 132 for width in (512, 2048, 4096, 8192)] == [8, 6, 3, 2]
    assert [of(width, 2) // 132 for width in (512, 2048, 4096, 8192)] == [8, 3, 2, 2]
    # a sum of a program takes as much as 32 rows of it
    assert norm_gpu.programs(8192, 1024, 2, 32) == 256


@BOTH
def test_dropout_is_that_of_the_op_to_the_bit(platform):
    shape = (2, 9, 128)
    x = jnp.ones(shape, jnp.bfloat16)

    def total(x):
        return ops.dropout_add_rms_norm(
            x, jnp.zeros_like(x), rate=0.4, rng=KEY, implementation="pallas"
        )[1]

    with simulated(platform) as run:
        out, grad = run(lambda x: _vjp(total, (x,)), x)
    want = ops.dropout(x, 0.4, KEY)
    np.testing.assert_array_equal(out, want)
    np.testing.assert_array_equal(grad[0] == 0, want == 0)


# -- what is kept


def _op(name, implementation):
    op = functools.partial(getattr(ops, name), implementation=implementation)
    return _dropping(op) if name.startswith("dropout") else op


@pytest.mark.fast("layer_norm-input", "rms_norm-output", "dropout_add_rms_norm-output")
@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize(
    "name", some_fast(NAMES, "layer_norm", "rms_norm", "dropout_add_rms_norm")
)
def test_keeps_no_more_than_the_reference(name, save):
    sums, count = name.startswith("dropout"), 1 if "rms" in name else 2
    args = _arguments((3, 5, 128), "bfloat16", sums=sums, count=count)
    pair = [functools.partial(_op(name, i), save=save) for i in ("pallas", "xla")]
    for wanted in references.subsets(range(len(args))):
        ours, plain_result = (references.kept_bytes(op, args, wanted) for op in pair)
        assert ours <= plain_result, wanted
    x, rows, every = args[0], 15, range(len(args))
    if save == "input":
        want = (x.nbytes + 8) * sums
    else:
        columns = 128 // 64
        want = x.nbytes + rows * 4 + columns * (rows * 2 + 4) + 8 * sums
    assert references.kept_bytes(pair[0], args, every) == want


# -- transformations


def _mapped(implementation):
    op = ops.dropout_add_rms_norm

    def one(x, residual, key, scale):
        run = functools.partial(op, rate=0.3, rng=key, implementation=implementation)
        return _vjp(run, (x, residual, scale))

    return jax.vmap(one, (0, 0, 0, None))


def _batch(width):
    x, residual, scale = _arguments((2, 5, width), "float32", sums=True, count=1)
    return x, residual, jax.random.split(KEY, 2), scale


@pytest.mark.slow
def test_under_vmap(monkeypatch):
    """On TPU; the GPU's simulator has no batching rule."""
    # the simulator cannot map a grid whose dimensions are said to be parallel
    monkeypatch.setattr(norm_tpu.pltpu, "CompilerParams", lambda **_: None)
    with simulated("tpu") as run:
        got = run(_mapped("pallas"), *_batch(150))
    want = _mapped("xla")(*_batch(150))
    for a, b in zip(*map(jax.tree.leaves, (got, want)), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


# -- where None may take a kernel, other platforms take XLA under the same rule


@pytest.fixture
def measured(monkeypatch):
    kinds = itertools.product(NAMES, ["float32", "bfloat16"], [False, True])
    every = tuple(
        dispatch.Measured(name, "h100", dtype, 0, backward)
        for name, dtype, backward in kinds
    )
    monkeypatch.setattr(dispatch, "MEASURED", every)


@pytest.mark.fast("layer_norm-output")
@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("name", some_fast(NAMES, "layer_norm"))
def test_xla_where_a_kernel_was_considered(measured, name, save):
    sums, count = name.startswith("dropout"), 1 if "rms" in name else 2
    args = _arguments((3, 128), "bfloat16", sums=sums, count=count)
    op = functools.partial(_op(name, None), save=save)
    plain = functools.partial(_op(name, "xla"), save=save)
    got, plain_result = (jax.jit(functools.partial(_vjp, f))(args) for f in (op, plain))
    _assert_close(got, plain_result, _reference(plain, args), "bfloat16")


@pytest.mark.slow
@pytest.mark.parametrize("save", ["input", "output"])
@pytest.mark.parametrize("name", NAMES)
def test_every_gradient_alone(measured, name, save):
    sums, count = name.startswith("dropout"), 1 if "rms" in name else 2
    for present in {0, count}:
        args = _arguments((3, 128), "float32", sums=sums, count=present)
        for wanted in references.subsets(range(len(args))):
            got, want = (
                _some(functools.partial(_op(name, how), save=save), args, wanted)
                for how in (None, "xla")
            )
            for a, b in zip(got, want, strict=True):
                np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.slow
@pytest.mark.parametrize("transform", sorted(references.TRANSFORMS))
@pytest.mark.parametrize("save", ["input", "output"])
def test_transformations_where_a_kernel_was_considered(measured, save, transform):
    op, plain = (
        functools.partial(_op("dropout_add_layer_norm", how), save=save)
        for how in (None, "xla")
    )
    args = lambda shape, dtype, rng: _arguments(shape, dtype, sums=True, count=2)
    both = references.Comparison(
        f"considered {save}", op, plain, args, diff=(0, 1, 2, 3)
    )
    references.check_equal(both, (3, 128), "float32", transform)


def _some(op, args, wanted):
    """The gradients of the `wanted` arguments."""

    def loss(*some):
        full = list(args)
        for i, x in zip(sorted(wanted), some, strict=True):
            full[i] = x
        return sum(jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(op(*full)))

    return jax.grad(loss, range(len(wanted)))(*(args[i] for i in sorted(wanted)))


# -- what is refused


X = jnp.ones((3, 128))
REFUSED = {
    "a mask": (lambda **k: ops.layer_norm(X, mask=X > 0, **k), "no mask"),
    "axes": (lambda **k: ops.layer_norm(X, axis=0, **k), "the last axis alone"),
    "codes": (lambda **k: ops.rms_norm(X, save=8, **k), 'save="input" and'),
    "no rows": (lambda **k: ops.rms_norm(X[:0], **k), "arrays "),
    "rate 1": (
        lambda **k: ops.dropout_add_rms_norm(X, X, rate=1.0, **k),
        "a rate below 1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_no_kernel_does_is_said(name, measured, monkeypatch):
    call, message = REFUSED[name]
    with pytest.raises(ValueError, match=f"no kernel for this .*{message}"):
        call(implementation="pallas")
    lowering.warn_once.cache_clear()
    with jax.sharding.use_abstract_mesh(chip_mesh("NVIDIA H100 80GB HBM3")):
        run = jax.jit(lambda: call())
        with pytest.warns(UserWarning, match=message):
            export.export(run, platforms=["cuda"])()


@BOTH
def test_dtypes_and_widths(platform):
    kernels, widest = MODULES[platform], MODULES[platform].WIDEST
    how = {"rules": NormRules(1e-6, True), "dtype": jnp.float32}
    run = lambda x: kernels.forward({"x": x}, **how)
    with jax.enable_x64(True), pytest.raises(NotImplementedError, match="not float64"):
        run(jnp.ones((2, 128), jnp.float64))
    with pytest.raises(NotImplementedError, match=f"at most {widest}"):
        run(jnp.ones((1, widest + 128)))
    bad = {"tpu": jnp.ones((2, 128), jnp.float16), "cuda": jnp.ones((2, 100))}
    with pytest.raises(NotImplementedError):
        run(bad[platform])


@pytest.mark.parametrize(
    "name", some_fast(["rms_norm", "dropout_add_layer_norm"], "rms_norm")
)
def test_second_derivatives_are_those_of_xla(name):
    """Of the formula in float32, summed in another order: 1e-5 of the largest."""
    x, residual = _draw(0, (24, 128)), _draw(1, (24, 128))
    scale = 1 + _draw(2, 128) / 4
    if name == "rms_norm":
        op, args = ops.rms_norm, (x, scale)
    else:
        bias, how = jnp.ones_like(scale), {"rate": 0.2, "rng": KEY}
        op = lambda *args, **kw: ops.dropout_add_layer_norm(*args, **how, **kw)[0]
        args = x, residual, scale, bias

    def curved(implementation, *args):
        fn = lambda *args: jnp.sum(op(*args, implementation=implementation) ** 3)
        dot = lambda *args: sum(jnp.sum(d * d) for d in jax.grad(fn, (0, 1))(*args))
        return jax.grad(dot, range(len(args)))(*args)

    lowering.warn_once.cache_clear()
    warns = pytest.warns(UserWarning, match=f"{name}: .* by XLA")
    with pallas_kernels.simulated("tpu"), warns:
        got = jax.jit(functools.partial(curved, "pallas"))(*args)
    for a, b in zip(got, curved("xla", *args), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5 * np.max(np.abs(b)))


# -- compiled for chips that are not here


def _estimate(platform, fn, *args, **options):
    target = TARGETS[platform]
    if target not in AVAILABLE:
        pytest.skip("targets extra")
    specs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), args)
    return jaxmem.estimate(jax.jit(fn, **options), *specs, target=target)


def _compiled(platform, rows, width, dtype, rate=0.1):
    """Both passes of the whole op, its incoming gradients given up."""
    x = jax.ShapeDtypeStruct((rows, width), dtype)
    vector = jax.ShapeDtypeStruct((width,), "float32")

    def backward(g_total, g, x, residual, scale, bias, key):
        op = lambda *a: ops.dropout_add_layer_norm(
            *a, rate=rate, rng=key, implementation="pallas"
        )
        return jax.vjp(op, x, residual, scale, bias)[1]((g, g_total))

    donated = {"donate_argnums": (0, 1)}
    return _estimate(platform, backward, x, x, x, x, vector, vector, KEY, **donated)


def _sums(platform, width) -> int:
    """Bytes of what the programs of a GPU add up for scale and bias."""
    return norm_gpu.shared_sums(width) * width * 8 if platform == "cuda" else 0


@pytest.mark.slow
@BOTH
def test_gradients_take_the_place_of_incoming_ones(platform):
    """Of the size of an activation there is the sum alone, which the op returns."""
    rows, width = 4096, 1024
    report = _compiled(platform, rows, width, "bfloat16")
    activation = rows * width * 2
    assert report.alias_bytes == 2 * activation
    # the norm's output is not wanted, and lies beside the sum for a moment
    assert report.temp_bytes <= 2 * activation + _sums(platform, width) + 4096


@BOTH
def test_backward_alone_allocates_nothing(platform):
    rows, width = 4096, 1024
    x = jax.ShapeDtypeStruct((rows, width), "bfloat16")
    vector = jax.ShapeDtypeStruct((width,), "float32")
    outs = {"x": x.dtype, "scale": vector.dtype, "bias": vector.dtype}

    def backward(g, x, scale):
        rules = NormRules(1e-6, True)
        return MODULES[platform].backward(
            {"g": g, "saved": x, "scale": scale}, rules=rules, outs=outs
        )

    report = _estimate(platform, backward, x, x, vector, donate_argnums=0)
    assert report.alias_bytes == rows * width * 2
    assert report.temp_bytes <= _sums(platform, width) + 1024


WIDE = [
    ("tpu", 16384, "float32"),
    ("tpu", 1000, "bfloat16"),
    ("cuda", 8192, "float32"),
    ("cuda", 384, "float16"),
]


@pytest.mark.slow
@pytest.mark.parametrize("platform, width, dtype", WIDE)
def test_widths_compile(platform, width, dtype):
    _compiled(platform, 1001, width, dtype)


@pytest.mark.slow
@BOTH
@pytest.mark.parametrize("save", ["input", "output"])
def test_scan_with_remat_compiles(platform, save):
    """Layers in a scan, their norms recomputed in the backward pass."""
    op = functools.partial(_op("dropout_add_layer_norm", "pallas"), save=save)

    @jax.checkpoint
    def layer(x, w):
        y, x = op(jnp.tanh(x @ w), x)
        return x + y, None

    def loss(x, ws):
        return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32))

    x, ws = jnp.ones((64, 128), jnp.bfloat16), jnp.ones((3, 128, 128), jnp.bfloat16)
    _estimate(platform, jax.grad(loss, (0, 1)), x, ws)


@pytest.mark.slow
@BOTH
def test_vmap_compiles(platform):
    _estimate(platform, _mapped("pallas"), *_batch(256))
