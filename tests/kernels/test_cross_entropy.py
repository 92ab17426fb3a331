"""Linear cross entropy with logits on the chip: as its XLA reference, and no logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.ops import linear_cross_entropy
from pallas_kernels import simulated
from pallas_kernels.cross_entropy import LossOptions
from pallas_kernels.cross_entropy import tpu as cross_entropy_tpu
from tests.arrays import array
from tests.references import kept_bytes

AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
OUT = -100
EVERYTHING = {
    "label_smoothing": 0.2,
    "z_loss": 0.1,
    "softcap": 3.0,
    "return_lse": True,
    "reduction": "sum",
    "ignore_index": OUT,
}


def arrays(
    tokens, features, words, dtype="float32", kernel_dtype=None, axis=1, bias=True
):
    r = np.random.default_rng(0)
    normal = lambda *s: array(r.standard_normal(s), "float32")
    kernel = (normal(features, words) / 8).astype(kernel_dtype or dtype)
    kernel = kernel if axis else kernel.T
    labels = array(r.integers(0, words, tokens), jnp.int32)
    labels = labels.at[0].set(OUT)
    offsets = normal(words).astype(kernel_dtype or dtype) if bias else None
    return normal(tokens, features).astype(dtype), kernel, offsets, labels


def outcome(implementation, args, wanted=(0, 1, 2), **options):
    """(loss, gradients), with the log-sum-exps in the loss where they are returned."""
    x, kernel, bias, labels = args
    options.setdefault("ignore_index", OUT)

    def loss(x, kernel, bias):
        out = linear_cross_entropy(
            x, kernel, labels, bias, implementation=implementation, **options
        )
        return out[0] + jnp.sin(out[1]).sum() if type(out) is tuple else out

    wanted = tuple(i for i in wanted if (x, kernel, bias)[i] is not None)
    return jax.jit(jax.value_and_grad(loss, wanted))(x, kernel, bias)


def check_equal(args, rtol, **options):
    """Against the largest element of the reference's."""
    want = outcome("xla", args, **options)
    with simulated("tpu"):
        got = outcome("pallas", args, **options)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        g, w = (np.asarray(t, "f8") for t in (g, w))
        assert np.abs(g - w).max() <= rtol * np.abs(w).max()


# -- the reference: the sums are the same in another order. In float32 that is some tens
# of roundings of 2**-24; in bfloat16 a gradient may round to its neighbour, 2**-8.


def with_batch_axes(taken_out):
    """Two batch axes, words that the bias takes out, tokens that do not count."""
    x, kernel, bias, labels = arrays(24, 128, 200)
    args = x.reshape(4, 6, 128), kernel, bias.at[taken_out:].set(-jnp.inf)
    return *args, labels.reshape(4, 6) % taken_out


CASES = [
    (with_batch_axes(140), {"where": jnp.arange(24).reshape(4, 6) % 3 > 0}),
    pytest.param(
        *(arrays(150, 128, 256, bias=False), {"block_size": 128}),
        marks=pytest.mark.slow,
    ),
    (arrays(140, 128, 300, axis=0), {"vocab_axis": 0, "block_size": 128} | EVERYTHING),
]


@pytest.mark.fast("everything")
@pytest.mark.parametrize("args, options", CASES, ids=["plain", "no bias", "everything"])
def test_equals_its_reference(args, options):
    check_equal(args, 1e-5, **options)


def test_equals_its_reference_in_bfloat16():
    args = arrays(130, 256, 260, "bfloat16", "float32", axis=0)
    check_equal(args, 2**-8, dtype="bfloat16", vocab_axis=0, block_size=128)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("tokens, words", [(1, 384), (256, 128), (300, 130)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_equals_its_reference_on_other_shapes(axis, words, tokens, dtype):
    with jax.enable_x64(tokens == 300):
        args = arrays(tokens, 128, words, dtype, axis=axis)
        options = EVERYTHING | {"vocab_axis": axis, "block_size": 128}
        check_equal(args, 1e-5 if dtype == "float32" else 2**-7, **options)


@pytest.mark.parametrize(
    "wanted", [pytest.param((i,), marks=[pytest.mark.slow] * (i > 0)) for i in range(3)]
)
def test_frozen_inputs(wanted):
    check_equal(arrays(20, 128, 130), 1e-5, wanted=wanted)


@pytest.mark.slow
def test_several_blocks_of_tokens():
    """Down in the kernels' own arguments: the public one has the largest that fit."""
    x, kernel, bias, labels = arrays(150, 128, 200)
    unit, wanted = jnp.float32(0.5), frozenset({"x", "kernel", "bias"})

    def run(block_tokens):
        how = LossOptions(block_tokens=block_tokens, block_vocabulary=128)
        arrays = x, kernel, bias, labels
        rows = cross_entropy_tpu.forward(*arrays, how, sums=True)
        g = {"log_total": x[:, 0], "hit": x[:, 1], "total": x[:, 2]}
        args = arrays, {k: rows[k] for k in ("top", "log_total")}, g, unit, how
        back = cross_entropy_tpu.backward(*args, wanted=wanted)
        return rows, back

    with simulated("tpu"):
        one, two = (jax.jit(run, static_argnums=0)(size) for size in (256, 128))
    same = functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5)
    jax.tree.map(same, two, one)


def test_keeps_what_its_reference_keeps():
    x, kernel, bias, labels = arrays(24, 128, 130)

    def kept(implementation):
        loss = lambda x, kernel, bias: linear_cross_entropy(
            x, kernel, labels, bias, reduction="sum", implementation=implementation
        )
        return kept_bytes(loss, (x, kernel, bias), (0, 1, 2))

    assert kept("pallas") == kept("xla") == 24 * 8


# -- compiled for a chip that is not there


def losses(
    tokens, features, words, axis=1, dtype="bfloat16", target="tpu-v5e", **options
):
    """What loss and gradients take beyond arguments and results."""
    struct = jax.ShapeDtypeStruct
    kernel = (features, words) if axis else (words, features)
    args = (
        struct((tokens, features), dtype),
        struct(kernel, dtype),
        struct((tokens,), jnp.int32),
        struct((words,), dtype),
    )
    loss = functools.partial(
        linear_cross_entropy, vocab_axis=axis, implementation="pallas", **options
    )
    step = jax.value_and_grad(loss, (0, 1, 3))
    with jax.numpy_dtype_promotion("standard"):
        return jaxmem.estimate(step, *args, target=target).temp_bytes


@pytest.mark.skipif("tpu-v5e" not in AVAILABLE, reason="targets extra")
@pytest.mark.slow
@pytest.mark.parametrize("words", [50257, 32000])
def test_logits_are_nowhere(words):
    """Rows of a token, the bias's gradient: far less than logits, x or a sum of it."""
    tokens, features = 8192, 1024
    temp = losses(tokens, features, words, **EVERYTHING | {"return_lse": False})
    assert temp <= 4 * (16 * tokens + 2 * words)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("target", ["tpu-v5e", "tpu-v5p", "tpu-v6e"])
def test_a_large_vocabulary_compiles(axis, target):
    if target not in AVAILABLE:
        pytest.skip("targets extra")
    temp = losses(8192, 4096, 131072, axis=axis, target=target)
    assert temp <= 4 * (16 * 8192 + 2 * 131072)


@pytest.mark.skipif("tpu-v5e" not in AVAILABLE, reason="targets extra")
def test_compiles_in_double_precision_mode():
    with jax.enable_x64(True):
        losses(200, 128, 300, dtype="float32")


def step_in_a_shard_map(check_vma: bool):
    """Loss and gradients of x, kernel and labels, the vocabulary on four devices."""
    mesh = jax.make_mesh((4,), ("v",), axis_types=(AxisType.Auto,))
    loss = jax.shard_map(
        functools.partial(linear_cross_entropy, axis_name="v", implementation="pallas"),
        mesh=mesh,
        in_specs=(P(), P(None, "v"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(jax.value_and_grad(loss, (0, 1)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_in_a_shard_map(check_vma):
    x, kernel, _, labels = arrays(16, 128, 512)
    step = step_in_a_shard_map(check_vma)
    text = export.export(step, platforms=["tpu"])(x, kernel, labels).mlir_module()
    assert text.count("tpu_custom_call") == 3


# -- what is refused


X, KERNEL, BIAS, LABELS = arrays(8, 128, 130)
REFUSED = [
    (
        (X[:, :100], KERNEL[:100], LABELS),
        {},
        "some tokens, and features in multiples of 128",
    ),
    ((X, KERNEL, LABELS), {"dtype": "float16"}, "float32 and bfloat16, not float16"),
    ((X, KERNEL, LABELS), {"block_size": 100}, "blocks in multiples of 128"),
    ((X[:0], KERNEL, LABELS[:0]), {}, "some tokens"),
]


@pytest.mark.parametrize(
    "args, options, message", REFUSED, ids=[m for *_, m in REFUSED]
)
def test_what_no_kernel_does(args, options, message):
    with pytest.raises(ValueError, match=f"TPU: {message}.*GPU: there is none"):
        linear_cross_entropy(*args, implementation="pallas", **options)


def test_features_that_do_not_fit():
    struct = jax.ShapeDtypeStruct
    args = struct((8, 2**16), "f4"), struct((2**16, 256), "f4"), struct((8,), "i4")
    with pytest.raises(ValueError, match="fewer features than 65536"):
        jax.eval_shape(
            functools.partial(linear_cross_entropy, implementation="pallas"), *args
        )


def test_double_precision_is_refused():
    with jax.enable_x64(True):
        x, kernel = (jnp.asarray(np.asarray(t), "f8") for t in (X, KERNEL))
        with pytest.raises(ValueError, match="sums in float32, not float64"):
            linear_cross_entropy(x, kernel, LABELS, implementation="pallas")


def test_another_platform_and_another_name():
    with pytest.raises(ValueError, match="no kernel for the platform"):
        linear_cross_entropy(X, KERNEL, LABELS, implementation="pallas")
    plain = linear_cross_entropy.__wrapped__  # past jaxtyping, which comes first
    with pytest.raises(ValueError, match="implementation='mosaic'"):
        plain(X, KERNEL, LABELS, implementation="mosaic")


def test_second_derivatives_are_refused():
    loss = lambda x: linear_cross_entropy(x, KERNEL, LABELS, implementation="pallas")
    with pytest.raises(ValueError, match="a first derivative alone"):
        jax.eval_shape(jax.hessian(loss), X)
