"""The records of all ops, those whose formulas contain others first."""

import jax
import jax.numpy as jnp

from jaxmem._compat import is_for_tpu
from jaxmem.ops.activations.records import GATED, SOFTMAX, UNARY
from jaxmem.ops.attention.records import ATTENTION
from jaxmem.ops.codes.save_quantized import save_quantized
from jaxmem.ops.cross_entropy.linear import linear_cross_entropy
from jaxmem.ops.embedding.records import EMBEDDINGS
from jaxmem.ops.linear.records import CONV, DENSE
from jaxmem.ops.norms.records import NORMS
from jaxmem.ops.randomness.dropout import dropout
from jaxmem.ops.record import Formula, Layers, OpRecord
from jaxmem.ops.sampled.dense import sampled_dense
from jaxmem.ops.sampled.velora import velora_dense
from jaxmem.ops.selection.max_pool import max_pool
from jaxmem.ops.selection.where import where


def _mask(x, key, keep):
    return jax.random.bernoulli(key, keep, x.shape)


def _lean_dropout(x, key, keep):
    # Another mask of the same law, recomputed when needed.
    return dropout(x, round(1 - keep, 6), key)


DROPOUT = OpRecord(
    dropout,
    tuple(
        Formula(
            plain,
            lean=_lean_dropout,
            examples=("*batch", "key"),
            scalars=("keep",),
            when=lambda keep: 0 < keep < 1,
        )
        for plain in (
            lambda x, key, keep: jnp.where(_mask(x, key, keep), x / keep, 0),
            lambda x, key, keep: x * _mask(x, key, keep).astype(x.dtype) / keep,
            lambda x, key, keep: jnp.where(_mask(x, key, keep), x, 0) / keep,
        )
    ),
    layers=Layers(("Dropout",), ("Dropout",)),
)


def _pool(x):
    ones = (1,) * x.ndim
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, ones, ones, "VALID")


def _lean_pool(x, *, window_dimensions, window_strides, padding, **dilations):
    sizes, strides = window_dimensions[:-1], window_strides[:-1]
    return max_pool(x, sizes, strides, padding[:-1])


def _is_lean_pool(
    window_dimensions, window_strides, padding, base_dilation, window_dilation
) -> bool:
    """Whether the last axis is not pooled, and no window has holes.

    None is on a TPU: to search for the maxima takes it less than to keep places.
    """
    if is_for_tpu():
        return False
    last = window_dimensions[-1:], window_strides[-1:], padding[-1:]
    return last == ((1,), (1,), ((0, 0),)) and {*base_dilation, *window_dilation} == {1}


_POOL_PARAMS = ("window_dimensions", "window_strides", "padding")
_POOL_PARAMS += ("base_dilation", "window_dilation")
MAX_POOL = OpRecord(
    max_pool,
    (Formula(_pool, lean=_lean_pool, params=_POOL_PARAMS, when=_is_lean_pool),),
)

RECORDS: tuple[OpRecord, ...] = (
    ATTENTION,
    *NORMS,
    DROPOUT,
    *GATED,
    *UNARY,
    *SOFTMAX,
    MAX_POOL,
    DENSE,
    CONV,
    *EMBEDDINGS,
    *map(OpRecord, (sampled_dense, velora_dense)),
    OpRecord(linear_cross_entropy, chips=("TPU",)),
    *map(OpRecord, (where, save_quantized)),
)


def table() -> str:
    """What every op keeps for its backward pass, as a table in Markdown."""
    rows = ["| op | keeps | Flax layers | formulas | kernel |", "|---|---|---|---|---|"]
    for record in sorted(RECORDS, key=lambda r: r.name):
        layers = dict.fromkeys((*record.layers.linen, *record.layers.nnx))
        formulas = str(len(record.formulas)) if record.formulas else ""
        kernel = ", ".join(record.kernels)
        cells = f"`{record.name}`", record.saves, ", ".join(layers), formulas, kernel
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


if __name__ == "__main__":
    print(table())
