"""Plain references of the normalisations, softmax and the dense layer."""

import functools

import jax
import jax.numpy as jnp

from jaxmem import ops
from tests.arrays import array
from tests.references import Comparison, nbytes, unary_args

SHAPES = ((8,), (3, 5, 13), (2, 4, 130))


def _wide(x):
    return x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x


def plain_norm(x, scale, bias, axes, features, epsilon, mask=None, centred=True):
    """The formula as Flax computes it, in float32 or wider; with its statistics."""
    wide = _wide(x)
    mean = functools.partial(jnp.mean, axis=axes, where=mask, keepdims=True)
    mu = mean(wide) if centred else jnp.zeros_like(mean(wide))
    var = jnp.maximum(mean(wide * wide) - mu * mu, 0.0)
    shape = [x.shape[a] if a in features else 1 for a in range(x.ndim)]
    factor = jax.lax.rsqrt(var + epsilon)
    if scale is not None:
        factor = factor * scale.astype(wide.dtype).reshape(shape)
    y = (wide - mu) * factor
    if bias is not None:
        y = y + bias.astype(wide.dtype).reshape(shape)
    return y.astype(x.dtype), mu, var


def plain_layer_norm(x, scale=None, bias=None, mask=None):
    last = (x.ndim - 1,)
    return plain_norm(x, scale, bias, last, last, 1e-6, mask)[0]


def plain_rms_norm(x, scale=None):
    last = (x.ndim - 1,)
    return plain_norm(x, scale, None, last, last, 1e-6, centred=False)[0]


def plain_group_norm(x, scale, bias, groups):
    split = x.reshape(*x.shape[:-1], groups, x.shape[-1] // groups)
    axes = (*range(1, x.ndim - 1), x.ndim)
    features = (x.ndim - 1, x.ndim)
    return plain_norm(split, scale, bias, axes, features, 1e-6)[0].reshape(x.shape)


def plain_batch_norm(x, scale, bias):
    features = (x.ndim - 1,)
    axes = tuple(range(x.ndim - 1))
    y, mean, var = plain_norm(x, scale, bias, axes, features, 1e-5)
    return y, mean.squeeze(axes), var.squeeze(axes)


def plain_batch_norm_inference(x, scale, bias, mean, var):
    factor = jax.lax.rsqrt(_wide(var) + 1e-5) * _wide(scale)
    at = lambda p: jnp.broadcast_to(p, x.shape)
    y = (_wide(x) - at(_wide(mean))) * at(factor) + at(_wide(bias))
    return y.astype(x.dtype)


def plain_dense(x, kernel, bias=None):
    y = jnp.tensordot(x, kernel.astype(x.dtype), 1)
    if bias is None:
        return y
    return y + jnp.broadcast_to(bias.astype(x.dtype), y.shape)


def _parameters(size, rng, count):
    """Scales round one, biases round zero, in float32 as modules keep them."""
    scale = array(1 + 0.2 * rng.standard_normal(size), jnp.float32)
    bias = array(0.2 * rng.standard_normal(size), jnp.float32)
    return (scale, bias)[:count]


def norm_args(count):
    def args(shape, dtype, rng):
        return (*unary_args(shape, dtype, rng), *_parameters(shape[-1], rng, count))

    return args


def masked_args(shape, dtype, rng):
    mask = rng.random(shape) < 0.7
    mask[..., 0] = True
    return (*norm_args(2)(shape, dtype, rng), jnp.asarray(mask))


def inference_args(shape, dtype, rng):
    mean, var = array(rng.standard_normal((2, shape[-1])) ** 2, jnp.float32)
    return (*norm_args(2)(shape, dtype, rng), mean, var + 0.1)


def dense_args(count):
    def args(shape, dtype, rng):
        kernel = array(rng.standard_normal((shape[-1], 7)), jnp.float32)
        bias = array(rng.standard_normal(7), jnp.float32)
        return (*unary_args(shape, dtype, rng), kernel, bias)[: 1 + count]

    return args


def where_args(shape, dtype, rng):
    where = rng.random(shape) < 0.7
    where[..., 0] = True
    return (*unary_args(shape, dtype, rng), jnp.asarray(where))


def _rows(x):
    return x.size // x.shape[-1]


def keeps_statistics(bytes_per_group, groups=_rows):
    """Nothing for bias alone; else so many bytes a group beyond the arguments."""
    return lambda args, wanted: (
        0 if wanted == frozenset({2}) else bytes_per_group * groups(args[0])
    )


def keeps_output(parameters=True):
    """Output, guarded channels and their places; a row's variance where x moves."""

    def saves(args, wanted):
        x = args[0]
        if wanted == frozenset({2}):
            return 0
        channels = max(1, x.shape[-1] // 64) if parameters else 0
        guard = channels * (_rows(x) * x.dtype.itemsize + 4)
        return nbytes(x) + guard + (4 * _rows(x) if 0 in wanted else 0)

    return saves


# The gradients through a recovered xhat are off by its error, eps / 4 (|b| / |s| + 1),
# times |rstd s g|: with the draws above below 4 eps; and by its sum over the rows.
RECOVERED = {"float32": 2e-6, "bfloat16": 0.06}


def _over_last(op, plain, name, count, save="input", args=None):
    """A norm over the last axis with `count` parameters, keeping what `save` says."""
    row_bytes = 4 if op is ops.rms_norm else 8
    kept = keeps_output(count > 0) if save == "output" else keeps_statistics(row_bytes)
    return Comparison(
        f"{op.__name__} {name}",
        lambda *arrays: op(
            *arrays[: 1 + count], mask=next(iter(arrays[1 + count :]), None), save=save
        ),
        *(plain, args or norm_args(count), SHAPES, tuple(range(1 + count)), kept),
        derivative_error=RECOVERED if save == "output" else {},
    )


NORMS = [
    *(
        _over_last(ops.layer_norm, plain_layer_norm, *case)
        for case in (
            ("input", 2),
            ("output", 2, "output"),
            ("scale alone", 1, "output"),
            ("without parameters", 0, "output"),
            ("masked", 2, "input", masked_args),
            ("masked output", 2, "output", masked_args),
        )
    ),
    _over_last(ops.rms_norm, plain_rms_norm, "input", 1),
    _over_last(ops.rms_norm, plain_rms_norm, "output", 1, "output"),
]

GROUP_NORM = [
    Comparison(
        f"group_norm {groups}",
        functools.partial(ops.group_norm, num_groups=groups),
        functools.partial(plain_group_norm, groups=groups),
        norm_args(2),
        ((3, 12), (2, 3, 5, 12)),
        (0, 1, 2),
        keeps_statistics(8, lambda x, n=groups: n * x.shape[0]),
    )
    for groups in (1, 4)
]

BATCH_NORM = [
    Comparison(
        "batch_norm",
        ops.batch_norm,
        plain_batch_norm,
        norm_args(2),
        ((6, 8), (3, 5, 13)),
        (0, 1, 2),
        keeps_statistics(8, lambda x: x.shape[-1]),
    ),
    Comparison(
        "batch_norm inference",
        lambda x, s, b, m, v: ops.batch_norm(x, s, b, mean=m, var=v),
        plain_batch_norm_inference,
        inference_args,
        ((6, 8), (3, 5, 13)),
        (0, 1, 2),
        lambda args, wanted: 0,
    ),
]

SOFTMAX = [
    Comparison(
        name,
        getattr(ops, name),
        getattr(jax.nn, name),
        unary_args,
        SHAPES,
        (0,),
        lambda args, wanted: nbytes(args[0]),
    )
    for name in ("softmax", "log_softmax")
] + [
    Comparison(
        "softmax where",
        lambda x, w: ops.softmax(x, where=w),
        lambda x, w: jax.nn.softmax(x, where=w),
        where_args,
        SHAPES,
        (0,),
        lambda args, wanted: nbytes(args[0]),
    )
]

DENSE = [
    Comparison(
        f"dense of {count} parameters",
        lambda x, *parameters: ops.dense(x, *parameters, dtype=x.dtype),
        plain_dense,
        dense_args(count),
        ((8,), (3, 5, 13)),
        (0, 1, 2)[: 1 + count],
        lambda args, wanted: 0,
    )
    for count in (1, 2)
]

COMPARISONS = NORMS + GROUP_NORM + BATCH_NORM + SOFTMAX + DENSE
