"""Storage in a few bits, one derivative a chain, MS norms, In-place ABN, max-pool."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp

from jaxmem import ops
from jaxmem._bits import packed_nbytes
from jaxmem.ops.codes.packing import packed_codes_nbytes
from jaxmem.ops.codes.quantization import Quantization, quantized_nbytes
from tests.arrays import array
from tests.ops.norms import normalization_references as plain
from tests.references import Comparison, nbytes, unary_args

BITS = Quantization(8, block_size=8)


def _chain(x, gate):
    return jnp.tanh(x) * jnp.exp(-x * x / 8) + jax.nn.silu(gate) * x


def _pair(shape, dtype, rng):
    return (*unary_args(shape, dtype, rng), *unary_args(shape, dtype, rng))


def _coded(x, how=BITS, dtype=None):
    return quantized_nbytes(x.shape, dtype or x.dtype, how)


def _saves_dense(args, wanted):
    return _coded(args[0]) if 1 in wanted else 0


def _saves_norm(args, wanted):
    if wanted == frozenset({2}):
        return 0
    rows = args[0].size // args[0].shape[-1]
    return _coded(args[0]) + (4 * rows if 0 in wanted else 0)


def _ms(x, scale, bias, kernel):
    return ops.dense(ops.ms_layer_norm(x, scale, bias), kernel, dtype=x.dtype)


def _layer_norm_dense(x, scale, bias, kernel):
    return plain.plain_dense(plain.plain_layer_norm(x, scale, bias), kernel)


def _ms_args(shape, dtype, rng):
    kernel = array(rng.standard_normal((shape[-1], 7)), jnp.float32)
    return (*plain.norm_args(2)(shape, dtype, rng), kernel)


def _saves_ms(args, wanted):
    x = args[0]
    if wanted == frozenset({2}):
        return 0
    return nbytes(x) + (4 * x.size // x.shape[-1] if 0 in wanted else 0)


def _abn(x, scale, bias, activation):
    return ops.inplace_abn(x, scale, bias, activation=activation)[0]


def _plain_abn(x, scale, bias, activation):
    z = plain.plain_batch_norm(plain._wide(x), scale, bias)[0]
    return activation(z).astype(x.dtype)


def _saves_abn(bit):
    def saves(args, wanted):
        x = args[0]
        channels = x.shape[-1]
        kept = nbytes(x) + (packed_nbytes(x.shape) if bit else 0)
        if wanted == frozenset({2}):
            return kept
        guard = max(1, channels // 64) * (x.size // channels * x.dtype.itemsize + 4)
        return kept + guard + (4 * channels if 0 in wanted else 0)

    return saves


def _image(shape, dtype, rng):
    return unary_args((2, *shape, 3), dtype, rng)


def _pool(sizes, strides, padding):
    options = dict(window_shape=sizes, strides=strides, padding=padding)

    def saves(args, wanted):
        bits = {4: 2, 6: 3}[sizes[0] * sizes[1]]
        out = jax.eval_shape(functools.partial(ops.max_pool, **options), *args)
        return packed_codes_nbytes(out.shape, bits)

    return Comparison(
        f"max_pool {sizes}",
        functools.partial(ops.max_pool, **options),
        functools.partial(nn.max_pool, **options),
        _image,
        ((5, 7),),
        saves=saves,
    )


# The kernel's gradient sums 15 rows' rounding errors of up to half a step (range 10 /
# 255) times cotangents below 4; the norm's sees the same of its normalised input, and
# its input's that error's mean over a row.
CODED = dict.fromkeys(("float32", "bfloat16"), 0.3)
# Of the recovered normalised input: see the Limits of the op; summed over 15 rows.
INVERTED = {"float32": 3e-4, "bfloat16": 0.15}

COMPARISONS = [
    Comparison(
        "elementwise chain",
        ops.elementwise(_chain),
        _chain,
        _pair,
        ((7,), (3, 5, 13)),
        (0, 1),
        lambda args, wanted: len(wanted) * nbytes(args[0]),
    ),
    Comparison(
        "dense in 8 bits",
        lambda x, k: ops.dense(x, k, dtype=x.dtype, save=BITS),
        plain.plain_dense,
        plain.dense_args(1),
        ((3, 5, 13),),
        (0, 1),
        _saves_dense,
        CODED,
    ),
    Comparison(
        "layer_norm in 8 bits",
        functools.partial(ops.layer_norm, save=BITS),
        plain.plain_layer_norm,
        plain.norm_args(2),
        ((3, 5, 13),),
        (0, 1, 2),
        _saves_norm,
        CODED,
    ),
    Comparison(
        "ms_layer_norm into dense",
        _ms,
        _layer_norm_dense,
        _ms_args,
        ((3, 5, 13),),
        (0, 1, 2, 3),
        _saves_ms,
        # One rounding of each weight more: eps / 2 of the kernel times xhat.
        {"float32": 0.0, "bfloat16": 0.05},
    ),
    *(
        Comparison(
            f"inplace_abn {name}",
            functools.partial(_abn, activation=name),
            functools.partial(_plain_abn, activation=activation),
            plain.norm_args(2),
            ((3, 5, 13),),
            (0, 1, 2),
            _saves_abn(name == "gelu"),
            INVERTED,
        )
        for name, activation in (
            ("leaky_relu", jax.nn.leaky_relu),
            ("gelu", jax.nn.gelu),
        )
    ),
    _pool((2, 2), (2, 2), "VALID"),
    _pool((2, 3), (1, 2), "SAME"),
]
