"""Cross entropy's numbers of each token, and the gradients through them, as one op.

Kernels hold logits on the chip; `rows.py` is their reference. The forward and the
backward pass choose each for itself: between them are the same arrays.
"""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem.ops.cross_entropy import rows as xla
from jaxmem.ops.cross_entropy.rows import Head, Rows
from pallas_kernels.cross_entropy import LossOptions
from pallas_kernels.dispatch import dispatch, kernel_module
from pallas_kernels.partials import partial

_NAME = "linear_cross_entropy"


def forward(head: Head, x, kernel, bias, labels) -> Rows:
    """The numbers of each token."""
    return dispatch(
        *(_NAME, head.implementation, x, kernel, bias, labels),
        xla=partial(xla.forward, head),
        tpu=partial(_forward, head),
    )


def backward(head: Head, wanted: frozenset[str], saved: dict, g: Rows) -> dict:
    """A dict of the gradients named in `wanted`."""
    return dispatch(
        *(_NAME, head.implementation, saved, g),
        xla=partial(xla.backward, head, wanted),
        tpu=partial(_backward, head, wanted),
        sized_by=saved["x"],
        backward=True,
    )


def _forward(head: Head, x, kernel, bias, labels) -> Rows:
    x, labels = xla.flat(x, labels)
    run = kernel_module("cross_entropy", "tpu").forward
    out = run(x, kernel, bias, labels, _options(head), sums=head.sums)
    return Rows(*(out.get(name) for name in Rows._fields))


def _backward(head: Head, wanted: frozenset[str], saved: dict, g: Rows) -> dict:
    x, labels = xla.flat(saved["x"], saved["labels"])
    g, unit = xla.in_units(g)
    rows = {name: getattr(saved["rows"], name) for name in ("top", "log_total")}
    cotangents = {name: getattr(g, name) for name in ("log_total", "hit")}
    cotangents["total"] = g.total if head.sums else None
    arrays = x, saved["kernel"], saved["bias"], labels
    run = kernel_module("cross_entropy", "tpu").backward
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


# What JAX derives from a loop that slices the kernel adds up a whole gradient in each
# iteration.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_rows(head: Head, x, kernel, bias, labels) -> Rows:
    """`Rows` of x [*batch, D], flat; differentiable in x, kernel and bias."""
    return forward(head, x, kernel, bias, labels)


def _rows_forward(head, x, kernel, bias, labels):
    inputs = {"x": x, "kernel": kernel, "bias": bias}
    wanted = {k for k, v in inputs.items() if v is not None and v.perturbed}
    saved = {k: None if v is None else v.value for k, v in inputs.items()}
    saved["labels"] = labels.value
    rows = forward(head, **saved)
    names = ("row_max", "row_log_sum")
    top, log_total = (
        checkpoint_name(row, f"jaxmem_linear_cross_entropy_{name}")
        for row, name in zip(rows[:2], names, strict=True)
    )
    rows = rows._replace(top=top, log_total=log_total)
    saved["rows"] = Rows(top, log_total, None, None)
    # a dict of no arrays: residuals may carry their structure, not strings
    return rows, (dict.fromkeys(wanted), saved)


def _rows_backward(head, residuals, g: Rows):
    wanted, saved = residuals
    zero = jnp.zeros_like(saved["rows"].top)
    symbolic = jax.custom_derivatives.SymbolicZero
    g = Rows(*(zero if isinstance(t, symbolic) else t for t in g))
    with jax.named_scope("jaxmem.linear_cross_entropy"):
        grads = backward(head, frozenset(wanted), saved, g)
    return *(grads.get(name) for name in ("x", "kernel", "bias")), None


token_rows.defvjp(_rows_forward, _rows_backward, symbolic_zeros=True)
