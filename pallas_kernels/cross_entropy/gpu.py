"""Cross entropy of a linear layer's logits on Hopper (compute capability 9.0).

Forward: a kernel in which a block of tokens stays with one program, and blocks of the
vocabulary stream past, with a running maximum and sum. If there are few tokens, the
vocabulary is divided among programs, and XLA combines their results.

Backward: the gradient of x needs sums over the vocabulary, that of the kernel sums over
tokens, and both are too large for a chip. So a kernel recomputes the logits of a block
and writes their cotangent, in the dtype of x, to a workspace, and XLA computes the
product: for x a block is some tokens and the whole vocabulary, for the kernel some
columns and all tokens. Neither product is then summed over blocks, which would need a
float32 gradient of x. The cost is to compute the logits twice: five products where
plain jax in blocks needs four, and three where only one of the gradients is wanted.

Supported: bfloat16 and float16, x and kernel alike, features in multiples of 64, and a
vocabulary in multiples of 64. `LossOptions.precision` has no effect.

Memory traffic in elements, with X = tokens * features, W = features * vocabulary and
L = tokens * vocabulary: forward X + W, and once more what the second-level cache did
not hold; for x 2 X + 2 L + 2 W (tokens / block); for the kernel 2 W + 2 L +
2 X (vocabulary / block).

Limits: a program is one warpgroup, which copies, multiplies and exponentiates in turn:
tensor cores wait unless the other program of the same processor has work for them.
Tiles of 128 by 128 read more from the second-level cache than larger ones would that
two warpgroups or several processors share. With every option registers spill, up to 300
bytes a thread for each tile. If 8 does not divide the tokens, x is copied. The block
sizes were not timed on a device.

Source: Wijmans et al., "Cut Your Losses in Large-Vocabulary Language Models" (ICLR
2025), section 4; Milakov and Gimelshein, "Online normalizer calculation for softmax"
(2018).
"""

from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pallas_kernels.arrays import dot, padded
from pallas_kernels.cross_entropy.gpu_programs import (
    CHUNK,
    COLUMNS,
    TOKENS,
    GpuLoss,
    gradient,
    statistics,
)
from pallas_kernels.cross_entropy.inputs import TINY, LossOptions

DTYPES = (jnp.bfloat16, jnp.float16)
# An H100 has 132 multiprocessors, each of which has room for two programs.
PROGRAMS = 2 * 132
# With fewer lines a product would be bound by reading the kernel, or x.
WORKSPACE_BYTES, _LEAST_LINES = 32 * 2**20, 256
_ROWS, _LENGTH = 8, 64  # of a tile in shared memory


def forward(
    x, kernel, bias, labels, options: LossOptions, *, sums: bool = False
) -> dict[str, Any]:
    """What is known of each token: see the package."""
    case = _case(x, kernel, options)
    inputs = _inputs(x, kernel, bias) | {"labels": padded(labels, TOKENS)}
    tokens = labels.size
    names = ["top", "total", "hit"] + ["sum"] * sums
    got = statistics(case, inputs, _splits(case), names)
    got = {name: t[:, :tokens] for name, t in got.items()}
    top = got["top"].max(axis=0)
    total = (got["total"] * jnp.exp(got["top"] - top[None])).sum(axis=0)
    # The floor is for a part of the vocabulary that is -inf alone.
    log_total = jnp.log(jnp.maximum(total, TINY))
    out = {"top": top, "log_total": log_total, "hit": got["hit"].sum(axis=0)}
    return out | ({"total": got["sum"].sum(axis=0)} if sums else {})


def backward(
    arrays,
    rows: dict[str, Any],
    g: dict[str, Any],
    unit,
    options: LossOptions,
    *,
    wanted: frozenset[str],
) -> dict[str, Any]:
    """The gradients of those arrays that are in `wanted`: see the package.

    Without `block_vocabulary` a workspace has 32 MiB, but at least 256 columns or rows.
    """
    x, kernel, bias, labels = arrays
    case = _case(x, kernel, options)
    vectors = _vectors(labels, rows, g)
    inputs = _inputs(x, kernel, bias)
    unit = unit.astype(jnp.float32)
    elements = options.block_vocabulary and options.block_vocabulary * case.rows
    grads = {}
    if "x" in wanted:
        tokens = _lines(x, case.vocabulary, elements)
        grads["x"] = _of_x(case, x, inputs, vectors, unit, tokens)
    if wanted & {"kernel", "bias"}:
        columns = _lines(x, case.rows, elements)
        grads |= _of_columns(case, inputs | vectors, unit, columns, wanted)
    if "bias" in grads:
        grads["bias"] = grads["bias"].astype(bias.dtype)
    return grads


def _case(x, kernel, options: LossOptions) -> GpuLoss:
    """The static part; NotImplementedError for what is not supported."""
    (tokens, features), vocabulary = x.shape, kernel.shape[options.vocab_axis]
    if x.dtype not in DTYPES or kernel.dtype != x.dtype:
        raise NotImplementedError(
            "tensor cores multiply bfloat16 or float16, both alike, not "
            f"{x.dtype} and {kernel.dtype}"
        )
    if features % CHUNK or not features or not tokens:
        raise NotImplementedError(
            f"some tokens, and features in multiples of {CHUNK}, not {x.shape}"
        )
    if vocabulary % _LENGTH:
        raise NotImplementedError(
            f"vocabularies that {_LENGTH} divides, not {vocabulary}: pad the kernel, "
            "and take columns out by a bias of -inf"
        )
    rows = _whole(tokens)
    static = options.vocab_axis, options.softcap
    return GpuLoss(*static, vocabulary, features, rows, vocabulary)


def _whole(tokens: int) -> int:
    return tokens + -tokens % _ROWS


def _inputs(x, kernel, bias) -> dict[str, Any]:
    if missing := -x.shape[0] % _ROWS:
        x = jnp.pad(x, ((0, missing), (0, 0)))
    if bias is None:
        return {"x": x, "kernel": kernel}
    bias = padded(bias.astype(jnp.float32), COLUMNS)
    return {"x": x, "kernel": kernel, "bias": bias}


def _splits(case: GpuLoss) -> int:
    """Parts of the vocabulary, none of them empty, such that all programs run."""
    parts = max(1, min(PROGRAMS // case.row_blocks, case.column_blocks))
    return -(-case.column_blocks // -(-case.column_blocks // parts))


def _lines(x, length: int, elements: int | None) -> int:
    """Lines of a workspace of `elements` whose other axis is `length` long."""
    if elements is None:
        return max(WORKSPACE_BYTES // (x.dtype.itemsize * length), _LEAST_LINES)
    return -(-elements // length)


def _over_blocks(step, carry, length: int, wanted: int, tile: int, x):
    """`step(carry, start, size)` over an axis, in whole tiles; the last may be shorter.

    The counter is tied to x. Otherwise XLA would move what depends on the counter and
    the labels alone out of a differentiated outer scan, and stack it.
    """
    alike = -(-length // -(-length // wanted))
    block = min(-(-alike // tile) * tile, length)

    def body(carry, n):
        n, _ = lax.optimization_barrier((n, x[:1, :1]))
        return step(carry, n * np.int32(block), block), None

    count, rest = divmod(length, block)
    if count:
        carry = lax.scan(body, carry, jnp.arange(count, dtype=jnp.int32))[0]
    return step(carry, jnp.int32(length - rest), rest) if rest else carry


def _vectors(labels, rows, g) -> dict[str, Any]:
    """The numbers of each token, padded to whole blocks with gradients of zero."""
    vectors = {"labels": labels, **rows}
    vectors |= {f"g_{name}": t for name, t in g.items() if t is not None}
    past, padding = {"labels": -1, "top": np.inf}, (0, -labels.size % TOKENS)
    pad = lambda name, t: jnp.pad(t, padding, constant_values=past.get(name, 0))
    return {name: pad(name, t) for name, t in vectors.items()}


def _of_x(case: GpuLoss, x, inputs, vectors, unit, tokens: int):
    """The gradient of x, some tokens at a time."""

    def step(out, start, size):
        length = -(-size // TOKENS) * TOKENS
        take = lambda t: lax.dynamic_slice_in_dim(t, start, length)
        part = inputs | {name: take(t) for name, t in vectors.items()}
        part["first"] = _first(start, 0)
        d = gradient(case._replace(rows=_whole(size)), part, sums=False)["d"]
        dx = unit * dot(d, inputs["kernel"], (1, case.axis))
        return _put(out, dx[:size], start, 0)

    return _over_blocks(step, jnp.zeros_like(x), x.shape[0], tokens, TOKENS, x)


def _of_columns(case: GpuLoss, inputs, unit, columns: int, wanted):
    """The gradients of kernel and bias, some columns at a time."""
    x, axis = inputs["x"], case.axis

    def step(grads, start, size):
        part, new = inputs | {"first": _first(0, start)}, {}
        got = gradient(case._replace(columns=size), part, "bias" in wanted)
        d = got["d"]
        if "bias" in wanted:
            new["bias"] = _put(grads["bias"], unit * got["sums"].sum(axis=0), start, 0)
        if "kernel" in wanted:
            dw = unit * dot(*((x, d) if axis else (d, x)), (0, 0))
            new["kernel"] = _put(grads["kernel"], dw, start, axis)
        return new

    init = {}
    if "kernel" in wanted:
        init["kernel"] = jnp.zeros_like(inputs["kernel"])
    if "bias" in wanted:
        init["bias"] = jnp.zeros_like(inputs["bias"][: case.vocabulary])
    return _over_blocks(step, init, case.columns, columns, COLUMNS, x)


def _first(token, column):
    """Blocks before these, of tokens and of columns."""
    return jnp.stack([jnp.int32(token) // TOKENS, jnp.int32(column) // COLUMNS])


def _put(array, block, start, axis: int):
    block = block.astype(array.dtype)
    return lax.dynamic_update_slice_in_dim(array, block, start, axis)
