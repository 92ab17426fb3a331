"""Which implementation computes linear cross entropy: kernels or XLA.

The kernels hold logits on the chip; `rows.py` is their reference. The
forward and the backward pass choose each for itself: between them are the same arrays.
"""

import functools

import jax.numpy as jnp

from jaxmem.ops.cross_entropy import rows as xla
from jaxmem.ops.cross_entropy.rows import Head, Rows
from pallas_kernels.cross_entropy import LossOptions
from pallas_kernels.dispatch import dispatch, kernel_module

_NAME = "linear_cross_entropy"


def forward(head: Head, x, kernel, bias, labels) -> Rows:
    """The numbers of each token."""
    return dispatch(
        *(_NAME, head.implementation, x, kernel, bias, labels),
        xla=functools.partial(xla.forward, head),
        tpu=functools.partial(_forward, "tpu", head),
        gpu=functools.partial(_forward, "gpu", head),
    )


def backward(head: Head, wanted: frozenset[str], saved: dict, g: Rows) -> dict:
    """A dict of the gradients named in `wanted`."""
    return dispatch(
        *(_NAME, head.implementation, saved, g),
        xla=functools.partial(xla.backward, head, wanted),
        tpu=functools.partial(_backward, "tpu", head, wanted),
        gpu=functools.partial(_backward, "gpu", head, wanted),
        sized_by=saved["x"],
        backward=True,
    )


def _forward(chip: str, head: Head, x, kernel, bias, labels) -> Rows:
    x, labels = xla.flat(x, labels)
    run = kernel_module("cross_entropy", chip).forward
    out = run(x, kernel, bias, labels, _options(head), sums=head.sums)
    return Rows(*(out.get(name) for name in Rows._fields))


def _backward(
    chip: str, head: Head, wanted: frozenset[str], saved: dict, g: Rows
) -> dict:
    x, labels = xla.flat(saved["x"], saved["labels"])
    g, unit = xla.in_units(g)
    rows = {name: getattr(saved["rows"], name) for name in ("top", "log_total")}
    cotangents = {name: getattr(g, name) for name in ("log_total", "hit")}
    cotangents["total"] = g.total if head.sums else None
    arrays = x, saved["kernel"], saved["bias"], labels
    run = kernel_module("cross_entropy", chip).backward
    grads = run(arrays, rows, cotangents, unit, _options(head), wanted=wanted)
    return {name: t.reshape(saved[name].shape) for name, t in grads.items()}


def _options(head: Head) -> LossOptions:
    if head.shards > 1:
        raise NotImplementedError(
            "arrays of one device (under jit over several: shard_map with axis_name)"
        )
    if jnp.finfo(head.accumulator).bits > 32:
        raise NotImplementedError(f"sums in float32, not {head.accumulator}")
    return LossOptions(
        vocab_axis=head.vocab_axis,
        softcap=head.softcap,
        precision=head.precision,
        block_vocabulary=head.kernel_block,
    )
