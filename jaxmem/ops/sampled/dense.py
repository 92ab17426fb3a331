"""A dense layer whose kernel gradient is an unbiased estimate from a part of the rows.

Of x the backward pass needs nothing but the kernel's gradient `x' dy`, a sum over rows.
Here k of the rows, or k random combinations of them, stand for all.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Key, UInt32

from jaxmem._checks import (
    check_array,
    check_choice,
    check_float,
    check_key,
    check_precision,
)
from jaxmem.ops.common.blocks import vary_alike
from jaxmem.ops.common.lean import widen
from jaxmem.ops.linear.dense import compute_dtype, dense
from jaxmem.ops.randomness.bits import seed_words
from jaxmem.ops.sampled import projection as projection
from jaxmem.ops.sampled.gradient import (
    add_bias,
    check_product,
    product,
    with_kernel_gradient,
)
from jaxmem.ops.sampled.norm_cache import check_norm_cache, noting, row_factors
from jaxmem.ops.sampled.rows import CHOICES

Method = Literal["wta", "crs", "uniform", "gaussian", "rademacher"]
_METHODS = (*CHOICES, *projection.ENTRIES)
_NAME = "jaxmem_sampled_dense_rows"


def sampled_dense(
    x: Float[Array, "*batch d"],
    kernel: Float[Array, "d f"],
    bias: Float[Array, " f"] | None = None,
    *,
    key: Key[Array, ""] | UInt32[Array, "..."],
    budget: float = 0.3,
    method: Method = "wta",
    row_norms: Float[Array, "*batch"] | None = None,
    norm_cache: Float[Array, "*samples"] | None = None,
    sample_ids: Int[Array, " n"] | None = None,
    dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
) -> Float[Array, "*batch f"]:
    """`x @ kernel + bias`; the kernel's gradient comes from a part of the rows of x.

    The output and the gradients of x and bias are exact. The kernel's gradient is an
    unbiased estimate: its mean over keys is the exact one. Rows are all batch axes
    together. Under a sharded `jit` rows are chosen among those of all devices, which
    moves them; inside `shard_map` each device chooses among its own: give each its own
    key. Forward mode gives the estimate too, unless there is a `norm_cache`.

    Args:
      x: any batch axes.
      kernel: as of `flax.linen.Dense`.
      bias: or None.
      key: typed or raw, another one for each layer and step.
      budget: in (0, 1]; the share of rows kept, rounded up; 1 is exact.
      method: "wta" keeps the rows of largest norm and draws the others by norm; "crs"
        draws all by norm; "uniform" keeps each as likely as any; "gaussian" and
        "rademacher" keep random combinations of all rows.
      row_norms: for "wta" and "crs", what the rows' norms are multiplied by: norms of
        the gradient of this output at an earlier step, say. Any positive numbers leave
        the estimate unbiased; a zero drops its row for good.
      norm_cache: instead of these, for "wta" and "crs", an array of the norms that the
        gradients of rows had in earlier steps, at first zeros: shape `(samples, ...)`,
        that of x without its last axis, and with any number of samples. Its gradient is
        its next value: of the samples in x it has the norms of this step. A tenth of
        a row's probability is that without a cache, so that none is dropped; a sample
        not seen yet counts as the mean of the others. A cache is of one call in a
        step: gradients of several calls, or of `vmap` over it, would be added up.
      sample_ids: which samples of `norm_cache` are in x, such as their numbers in the
        data set, one for each entry of its first axis; -1 for one that has no place
        there. None: those of the same place in the batch of the step before.
      dtype: to compute in, as for `dense`.
      precision: of the product, as for `dense`.

    Returns:
      Shape `(*batch, f)`, in `dtype`.

    Raises:
      ValueError: a budget outside (0, 1], an unknown method, shapes that do not fit,
        `row_norms` or `norm_cache` for a method that has no use for them, or both.

    Saves:
      For the kernel `ceil(budget * rows)` rows of d in `dtype`, and 4 bytes a row
      ("wta", "crs", "uniform") or 8 in all (projections, which in blocks round the
      number of rows up); with a frozen kernel nothing of x. For x the kernel, as
      `dense`. Of `norm_cache` no copy.

    Error:
      In Frobenius norms about `|x| |dy| sqrt((1 - budget) / k)` for k rows kept where
      rows are alike ("uniform", whatever the rows; "crs" and "wta" less, the more their
      norms differ), and `|x| |dy| / sqrt(k)` for projections. It is noise on top of
      that of the batch, and does not shrink as training goes on.

    Cost:
      Rows: the kernel's gradient takes `budget` of its flops; norms, a top-k and a
      cumulative sum of the rows. Projections: `2 k rows (d + f)` flops more, above the
      plain gradient's own where `budget * rows > d f / (d + f)`.

    Source:
      Liu et al., WTA-CRS (NeurIPS 2023), arXiv 2305.15265, section 3; Bershatsky et
      al., randomized linear layers (2022), arXiv 2201.13195, section 2.
    """
    check_product("sampled_dense", x, kernel, bias)
    budget = check_sampling(budget, method)
    check_key("sampled_dense: key", key)
    check_precision("sampled_dense: precision", precision)
    _check_norms(x, row_norms, norm_cache, method)
    check_norm_cache("sampled_dense", x, norm_cache, sample_ids)
    dtype = compute_dtype("sampled_dense", dtype, x, kernel, bias)
    rows = math.prod(x.shape[:-1])
    k = math.ceil(budget * rows - 1e-6)  # 0.3 * 10 rows are 3, in spite of rounding
    with jax.named_scope("jaxmem.sampled_dense"):
        if norm_cache is not None:
            row_norms = row_factors(x, norm_cache, sample_ids)
        if k >= rows:
            y = dense(x, kernel, bias, dtype=dtype, precision=precision)
        else:
            multiply = _multiply(method, k, precision)
            y = add_bias(multiply(x.astype(dtype), kernel, key, row_norms), bias)
        return y if norm_cache is None else noting(y, norm_cache, sample_ids)


@functools.cache
def _multiply(method: str, k: int, precision):
    keep, tangent = (_by_rows if method in CHOICES else _by_projection)(method, k)
    product_of = with_kernel_gradient(keep, tangent, precision)

    def multiply(x, kernel, key, norms):
        norms = None if norms is None else norms.reshape(-1)
        x, kernel, seed, norms = vary_alike(x, kernel, seed_words(key), norms)
        return product_of(x, kernel, (seed, norms))

    return multiply


def _by_rows(method: str, k: int):
    def keep(x, extras):
        seed, row_norms = extras
        still = jax.lax.stop_gradient(x)
        places, weights = CHOICES[method](seed, still, k, row_norms)
        rows = widen(x.at[places].get(mode="promise_in_bounds"))
        rows = (rows * weights.astype(rows.dtype)[:, None]).astype(x.dtype)
        return checkpoint_name((rows, places), _NAME)

    def tangent(kept, count, kernel_dot):
        rows, places = kept
        part = product(rows, kernel_dot)
        whole = jnp.zeros_like(part, shape=(count, part.shape[1]))
        return whole.at[places].add(part, mode="promise_in_bounds")

    return keep, tangent


def _by_projection(method: str, k: int):
    def keep(x, extras):
        seed, _ = extras
        return checkpoint_name(projection.project(method, k, seed, x), _NAME), seed

    def tangent(kept, count, kernel_dot):
        rows, seed = kept
        u = product(rows, kernel_dot)
        return projection.project_back(method, k, seed, count, u)

    return keep, tangent


def check_sampling(budget: float, method: str) -> float:
    """The budget; errors for one out of range and for an unknown method."""
    check_choice("method", method, _METHODS)
    return check_float("budget", budget, above=0, at_most=1)


def check_weighted(what: str, method: str) -> None:
    """An error where a method does not draw rows by their norms."""
    if method not in ("wta", "crs"):
        raise ValueError(f"{what} for wta and crs, not {method!r}")


def _check_norms(x, row_norms, norm_cache, method: str) -> None:
    op = "sampled_dense"
    if norm_cache is not None:
        check_weighted(f"{op}: a norm_cache is", method)
    if row_norms is None:
        return
    check_array(f"{op}: row_norms", row_norms, "floating")
    check_weighted(f"{op}: row_norms are", method)
    if norm_cache is not None:
        raise ValueError(f"{op}: row_norms or norm_cache, not both")
    if row_norms.shape != x.shape[:-1]:
        raise ValueError(f"{op}: row_norms {row_norms.shape} for x {x.shape}")
