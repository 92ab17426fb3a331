"""VeLoRA: of each part of a token one number is kept, its projection on a fixed vector.

What is orthogonal to that vector is lost from the kernel's gradient, in every step.
Source: Miles et al. (NeurIPS 2024), arXiv 2405.17991, section 3.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float

from jaxmem._checks import (
    check_array,
    check_choice,
    check_float,
    check_int,
    check_precision,
    wrong_value,
)
from jaxmem.ops.common.blocks import vary_alike
from jaxmem.ops.common.lean import widen
from jaxmem.ops.linear.dense import compute_dtype
from jaxmem.ops.sampled.gradient import (
    add_bias,
    check_product,
    product,
    with_kernel_gradient,
)


def velora_dense(
    x: Float[Array, "*batch d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"] | None = None,
    *,
    projection: Float[Array, " m"],
    scale: float = 1.0,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch f"]:
    """`x @ kernel + bias`; the kernel's gradient sees one direction of each sub-token.

    The output and the gradients of x and bias are exact. The kernel's gradient is
    `scale * x_hat' dy`, where `x_hat` is x with each group of m features replaced by
    its projection on `projection`.

    Args:
      x: any batch axes.
      kernel: as of `flax.linen.Dense`.
      bias: or None.
      projection: the unit vector v; d / m groups, so m must divide d. From
        `velora_projection` of inputs that the layer trains on; no gradient is taken
        of it.
      scale: of the kernel's gradient.
      dtype: to compute in, as for `dense`.
      precision: of the product, as for `dense`.

    Returns:
      Shape `(*batch, f)`, in `dtype`.

    Raises:
      ValueError: m does not divide d, or shapes that do not fit.

    Saves:
      For the kernel `rows * d / m` values in `dtype`, and the vector; with a frozen
      kernel nothing of x. For x the kernel, as `dense`.

    Error:
      Biased by all that is orthogonal to v: `(1 - v v') x_g` of each group never
      reaches the gradient, and the m rows of the gradient of a group are multiples of
      one. In Frobenius norms at most `|x - x_hat| |dy|`.

    Source:
      Miles et al., VeLoRA (NeurIPS 2024), arXiv 2405.17991, section 3.
    """
    check_product("velora_dense", x, kernel, bias)
    check_array("velora_dense: projection", projection, "floating")
    check_precision("velora_dense: precision", precision)
    scale = check_float("velora_dense: scale", scale)
    if projection.ndim != 1 or projection.size == 0 or x.shape[-1] % projection.size:
        raise ValueError(
            f"velora_dense: projection {projection.shape} must be one vector whose "
            f"length divides the {x.shape[-1]} features of x"
        )
    dtype = compute_dtype("velora_dense", dtype, x, kernel, bias)
    with jax.named_scope("jaxmem.velora_dense"):
        x, kernel, v = vary_alike(x, kernel, projection)
        multiply = _rank_one(scale, precision)
        return add_bias(multiply(x.astype(dtype), kernel, v.astype(dtype)), bias)


@functools.cache
def _rank_one(scale: float, precision):
    def keep(x, v):
        groups = x.reshape(-1, v.size)
        z = product(groups, v).reshape(x.shape[0], x.shape[1] // v.size)
        return checkpoint_name(z, "jaxmem_velora_dense_projections"), v

    def tangent(kept, count, kernel_dot):
        z, v = kept
        groups = kernel_dot.reshape(z.shape[1], v.size, kernel_dot.shape[1])
        along = jax.lax.dot_general(groups, v, (((1,), (0,)), ((), ())))
        part = product(z, along)
        return (scale * widen(part)).astype(part.dtype)

    return with_kernel_gradient(keep, tangent, precision)


def velora_projection(
    x: Float[Array, "*batch d"],
    groups: int,
    method: Literal["average", "svd"] = "average",
) -> Float[Array, " m"]:
    """The vector for `velora_dense`, from the sub-tokens of a first batch.

    Args:
      x: inputs of the layer, of a first batch.
      groups: parts of a token; must divide d.
      method: "average" is the mean of all sub-tokens, normalised; "svd" their first
        right singular vector, which loses the least of x.

    Returns:
      A unit vector of d / groups, float32 or wider. Where x has none (its mean is zero,
      or it is not finite), that with all elements alike.

    Raises:
      ValueError: `groups` does not divide d, or an unknown method.

    Saves:
      Nothing: no gradient is taken.

    Cost:
      "average": one pass over x. "svd": `2 rows d m` flops, and the eigenvectors of a
      matrix of `(m, m)`.

    Source:
      Miles et al., VeLoRA (NeurIPS 2024), arXiv 2405.17991, section 3.
    """
    check_array("velora_projection: x", x, "floating")
    groups = check_int("velora_projection: groups", groups, 1)
    check_choice("velora_projection: method", method, (*DIRECTIONS,))
    size = x.shape[-1] if x.ndim else 0
    if size == 0:
        raise wrong_value("velora_projection: x", x, "an array with a last axis")
    if size % groups:
        raise ValueError(f"velora_projection: groups={groups} must divide {size}")
    with jax.named_scope("jaxmem.velora_projection"):
        return projection_if_any(x, groups, method)[0]


def projection_if_any(x, groups: int, method: str) -> tuple[jax.Array, jax.Array]:
    """The vector as above, and whether it is one of x."""
    parts = jax.lax.stop_gradient(x).reshape(-1, x.shape[-1] // groups)
    vector = DIRECTIONS[method](parts)
    norm = jnp.sqrt(jnp.sum(vector * vector))
    exists = (norm > 0) & jnp.isfinite(norm)
    alike = jnp.full_like(vector, vector.size**-0.5)
    return jnp.where(exists, vector / jnp.where(exists, norm, 1.0), alike), exists


def _average(parts):
    return widen(parts).mean(0)


def _first_singular_vector(parts):
    """An eigenvector of `parts' parts`, which is small; not zero if all parts are."""
    wide = jnp.promote_types(parts.dtype, jnp.float32)
    gram = jax.lax.dot_general(
        *(parts, parts, (((0,), (0,)), ((), ()))),
        precision="highest",
        preferred_element_type=wide,
    )
    vector = jnp.linalg.eigh(gram)[1][:, -1]
    # either sign is one: the same on every backend
    vector = jnp.where(vector.sum() < 0, -vector, vector)
    return jnp.where(jnp.trace(gram) > 0, vector, jnp.zeros_like(vector))


DIRECTIONS = {"average": _average, "svd": _first_singular_vector}
