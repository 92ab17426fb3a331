"""Cross entropy's numbers of each token, and the gradients through them, as one op."""

import functools

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jaxmem.ops.cross_entropy import kernels as kernels
from jaxmem.ops.cross_entropy.rows import Head, Rows


# What JAX derives from a loop that slices the kernel adds up a whole gradient in each
# iteration.
@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def token_rows(head: Head, x, kernel, bias, labels) -> Rows:
    """`Rows` of x [*batch, D], flat; differentiable in x, kernel and bias."""
    return kernels.forward(head, x, kernel, bias, labels)


def _rows_forward(head, x, kernel, bias, labels):
    inputs = {"x": x, "kernel": kernel, "bias": bias}
    wanted = {k for k, v in inputs.items() if v is not None and v.perturbed}
    saved = {k: None if v is None else v.value for k, v in inputs.items()}
    saved["labels"] = labels.value
    rows = kernels.forward(head, **saved)
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
        grads = kernels.backward(head, frozenset(wanted), saved, g)
    return *(grads.get(name) for name in ("x", "kernel", "bias")), None


token_rows.defvjp(_rows_forward, _rows_backward, symbolic_zeros=True)
