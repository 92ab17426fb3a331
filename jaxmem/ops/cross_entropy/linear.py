"""Cross entropy of a linear layer's logits, which never exist whole."""

from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Bool, Float, Int

from jaxmem._checks import (
    check_array,
    check_axis_name,
    check_bool,
    check_choice,
    check_dtype,
    check_float,
    check_int,
    check_precision,
    wrong_type,
)
from jaxmem.ops.common.blocks import devices_of, vary_alike
from jaxmem.ops.common.lean import wide_dtype
from jaxmem.ops.cross_entropy.kernels import token_rows
from jaxmem.ops.cross_entropy.rows import Head, Rows, block_columns
from jaxmem.ops.linear.dense import compute_dtype
from pallas_kernels.dispatch import Implementation, check_implementation

_REDUCTIONS = ("mean", "sum", "none")


def linear_cross_entropy(
    x: Float[Array, "*batch d"],
    kernel: Float[Array, "_ _"],
    labels: Int[Array, "*batch"],
    bias: Float[Array, " v"] | None = None,
    *,
    vocab_axis: int = -1,
    ignore_index: int | None = None,
    where: Bool[Array, "*batch"] | None = None,
    weights: Float[Array, "*batch"] | None = None,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    softcap: float | None = None,
    reduction: Literal["mean", "sum", "none"] = "mean",
    return_lse: bool = False,
    axis_name: str | tuple[str, ...] | None = None,
    dtype: DTypeLike | None = None,
    accumulator_dtype: DTypeLike | None = None,
    precision: jax.lax.PrecisionLike = None,
    block_size: int | None = None,
    implementation: Implementation | None = None,
) -> Any:
    """Cross entropy of `softmax(x @ kernel + bias)` with integer labels.

    As `optax.softmax_cross_entropy_with_integer_labels(x @ kernel + bias, labels)` on
    float32 logits, without the logits: a block of the vocabulary at a time.

    Reverse mode, also twice (then without the savings), and forward over reverse mode.
    Under a sharded `jit` a block takes columns from every shard of the vocabulary, so
    that a sharded kernel is not gathered; the gradient of x is then summed over the
    shards once a block, with `axis_name` inside `shard_map` once. Do not `vmap` over
    examples that share a kernel: each gets a gradient of it of its own before they are
    summed, as under every custom derivative. Give x batch axes instead.

    Args:
      x: the last hidden states, any batch axes.
      kernel: `[d, v]`, as of `flax.linen.Dense`.
      labels: integers in `[0, v)`. A label outside that is counted gives a NaN loss.
      bias: `[v]`; -inf takes a column out (padding of the vocabulary).
      vocab_axis: the kernel's axis of the vocabulary; 0 for an embedding table
        `[v, d]` (tied embeddings).
      ignore_index: tokens of this label count for nothing, whether in range or not.
      where: boolean, the tokens that count.
      weights: of the tokens' losses; "mean" divides by their sum. A token of weight
        zero does not count.
      label_smoothing: in [0, 1]: the target is `1 - label_smoothing` on the label plus
        `label_smoothing / v` everywhere.
      z_loss: adds `z_loss * log_sum_exp**2` to each token's loss.
      softcap: logits become `softcap * tanh(logits / softcap)`.
      reduction: "mean" over the tokens that count (0 if there are none), "sum", or
        "none".
      return_lse: also return the log-sum-exp of each token, differentiable.
      axis_name: inside `shard_map`, the mesh axes over which the vocabulary is divided,
        in order; kernel and bias are this device's columns, labels are global, x and
        labels the same on all. "mean" is over the tokens of this device.
      dtype: of the products' operands; None: what x, kernel and bias promote to. A
        kernel in another dtype is cast a block at a time.
      accumulator_dtype: in which the gradient of x is added up over the blocks; None:
        float32 or wider. Narrower saves bytes and loses a digit or two.
      precision: of the products, as for `jax.lax.dot_general`.
      block_size: columns of a block, over all shards; None: as many as keep the
        float32 logits within 32 MiB (times the devices of a mesh), at least 512.
        With "pallas" a multiple of 128, None: what fits on the chip.
      implementation: "xla"; "pallas" for the Pallas kernels of a TPU, which keep logits
        and sums on the chip (arrays of one device, a first derivative, float32 and
        bfloat16, features in multiples of 128); None for them where they were measured
        to be no slower.

    Returns:
      float32 or wider: a scalar, or with "none" the shape of labels; with `return_lse`
      a pair of that and the log-sum-exps, of the shape of labels.

    Raises:
      ValueError: shapes that do not fit each other, an option out of range, arrays
        sharded over explicit mesh axes (wrap the call in `jax.sharding.auto_axes`), an
        implementation that is not available.
      TypeError: labels that are not integers, x or kernel that are not floating.

    Saves:
      x in `dtype` and the kernel (arguments of this call), the labels, and 8 bytes a
      token. In the backward pass there are also the gradient of x in
      `accumulator_dtype` and one block of logits; with "pallas" neither.

    Error:
      Logits, softmax and sums are float32 or wider; only the gradient of the logits is
      rounded to `dtype` before its products, as a matmul of `dtype` takes it.

    Source:
      Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (ICLR
      2025), section 4.

    Example::

      loss = jaxmem.ops.linear_cross_entropy(x, params["head"], tokens)
    """
    check_choice("reduction", reduction, _REDUCTIONS)
    smoothing, z_loss = label_smoothing, check_float("z_loss", z_loss, at_least=0)
    smoothing = check_float("label_smoothing", smoothing, at_least=0, at_most=1)
    softcap = None if softcap is None else check_float("softcap", softcap, above=0)
    block_size = None if block_size is None else check_int("block_size", block_size, 1)
    check_bool("return_lse", return_lse)
    check_axis_name("axis_name", axis_name)
    check_precision("precision", precision)
    if ignore_index is not None:
        ignore_index = check_int("ignore_index", ignore_index)
    check_implementation(implementation)
    axis = _check_shapes(x, kernel, labels, bias, vocab_axis)
    _check_masks(labels, where, weights)
    _check_sharding(x, kernel)
    dtype = compute_dtype("linear_cross_entropy", dtype, x, kernel, bias)
    size = kernel.shape[axis]
    shards = _vocabulary_shards(x, kernel, size)
    head = Head(
        vocab_axis=axis,
        softcap=softcap,
        sums=smoothing > 0,
        accumulator=_accumulator(accumulator_dtype, dtype),
        precision=precision,
        block=block_columns(labels.size, size, shards, block_size),
        shards=shards,
        implementation=implementation,
        kernel_block=block_size,
    )
    with jax.named_scope("jaxmem.linear_cross_entropy"):
        labels = labels.astype(jnp.int32)
        mine = labels
        if axis_name is not None:
            mine = labels - lax.axis_index(axis_name) * size
        rows: Any = token_rows(head, *vary_alike(x.astype(dtype), kernel, bias, mine))
        size, rows = _whole_vocabulary(rows, size, axis_name)
        loss, lse = _token_losses(rows, size, smoothing, z_loss)
        loss, lse = loss.reshape(labels.shape), lse.reshape(labels.shape)
        loss = loss + jnp.where((labels >= 0) & (labels < size), 0.0, jnp.nan)
        share = _share(loss, labels, ignore_index, where, weights)
        loss = _reduce(loss, share, reduction)
    return (loss, lse) if return_lse else loss


def _whole_vocabulary(rows: Rows, size: int, axis_name) -> tuple[int, Rows]:
    """The vocabulary's size and the rows over all devices that share it."""
    top = lax.stop_gradient(rows.top)
    if axis_name is None:
        return size, rows._replace(top=top)
    size = size * lax.axis_size(axis_name)
    highest = lax.pmax(top, axis_name)
    parts = jnp.exp(rows.log_total + (top - highest)), rows.hit, rows.total
    total, hit, logits = lax.psum(parts, axis_name)
    return size, Rows(highest, jnp.log(total), hit, logits)


def _token_losses(rows: Rows, size: int, label_smoothing: float, z_loss: float):
    """The loss and the log-sum-exp of each token."""
    # Differences to the largest logit: that one may be large, and the loss small.
    target = rows.hit - rows.top
    if label_smoothing:
        mean = rows.total / size - rows.top
        target = (1 - label_smoothing) * target + label_smoothing * mean
    loss, lse = rows.log_total - target, rows.top + rows.log_total
    return (loss + z_loss * lse**2 if z_loss else loss), lse


def _share(loss, labels, ignore_index, where, weights):
    """The weight of each token's loss; None: all ones."""
    if ignore_index is not None:
        counted = labels != ignore_index
        where = counted if where is None else where & counted
    if where is None:
        return None if weights is None else weights.astype(loss.dtype)
    share = jnp.ones_like(loss) if weights is None else weights.astype(loss.dtype)
    return jnp.where(where, share, 0.0)


def _reduce(loss, share, reduction: str):
    if share is not None:
        # A token that does not count may have any label, and so a NaN.
        loss = jnp.where(share != 0, loss, 0.0) * share
    if reduction == "none":
        return loss
    if reduction == "sum":
        return loss.sum()
    count = float(max(loss.size, 1)) if share is None else share.sum()
    return loss.sum() / jnp.where(count == 0, 1.0, count)


def _check_sharding(*arrays) -> None:
    # Loops over slices need axes whose shardings the compiler chooses.
    specs = (jax.typeof(a).sharding.spec for a in arrays)
    if any(axis is not None for spec in specs for axis in spec):
        raise ValueError(
            "linear_cross_entropy: x or kernel is sharded over explicit mesh axes; "
            "wrap the call in jax.sharding.auto_axes, or use shard_map and axis_name"
        )


def _vocabulary_shards(x, kernel, size: int) -> int:
    """In how many equal parts the compiler may have divided the vocabulary."""
    shards = max(devices_of(x), devices_of(kernel))
    return shards if size % shards == 0 else 1


def _accumulator(accumulator_dtype, dtype):
    if accumulator_dtype is None:
        return jnp.dtype(wide_dtype(dtype))
    return check_dtype("accumulator_dtype", accumulator_dtype, "inexact")


def _check_shapes(x, kernel, labels, bias, vocab_axis: int) -> int:
    """The kernel's axis of the vocabulary, 0 or 1."""
    op = "linear_cross_entropy"
    for name, array in (("x", x), ("kernel", kernel)):
        check_array(f"{op}: {name}", array, "floating")
    check_array(f"{op}: labels", labels, "integer")
    vocab_axis = check_int(f"{op}: vocab_axis", vocab_axis, -2, 1)
    if kernel.ndim != 2 or x.ndim == 0:
        raise ValueError(
            f"{op}: x {x.shape} and kernel {kernel.shape}, not [..., d] and two axes"
        )
    axis = vocab_axis % 2
    if kernel.shape[1 - axis] != x.shape[-1]:
        raise ValueError(
            f"{op}: kernel {kernel.shape} with vocab_axis={vocab_axis} takes "
            f"{kernel.shape[1 - axis]} features, x {x.shape} has {x.shape[-1]} "
            "(an embedding table [v, d] needs vocab_axis=0)"
        )
    if kernel.shape[axis] == 0:
        raise ValueError(f"{op}: kernel {kernel.shape} has an empty vocabulary")
    if labels.shape != x.shape[:-1]:
        raise ValueError(
            f"{op}: labels {labels.shape} for x {x.shape}: the batch axes must agree"
        )
    if bias is not None and check_array("bias", bias).shape != (kernel.shape[axis],):
        raise ValueError(
            f"{op}: bias {bias.shape} for a vocabulary of {kernel.shape[axis]}"
        )
    return axis


def _check_masks(labels, where, weights) -> None:
    op = "linear_cross_entropy"
    for name, array in (("where", where), ("weights", weights)):
        if array is not None and check_array(name, array).shape != labels.shape:
            raise ValueError(f"{op}: {name} {array.shape} for labels {labels.shape}")
    if where is not None and where.dtype != jnp.bool_:
        raise wrong_type(f"{op}: where", where, "an array of bools; or pass weights")
