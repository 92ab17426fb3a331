"""What attention's kernels on a TPU are given: blocks of arrays, grids, scalars.

Heads lie side by side in the lanes, [b, t, n * h], and a block has as many heads as
fill 128 lanes: a pack. Where there are fewer key heads than query heads, each of them
fills a pack by itself, repeated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import _attention as common
from pallas_kernels._attention import Inputs, Rules

LANES = 128
BLOCKS = 512, 256, 128  # the first that leaves room on the chip
MOST_HEAD = 256
CHIP_BYTES = 15 * 2**20  # a kernel's memory on the chip is 16 MiB, or more
ZERO = np.int32(0)  # a plain 0 would be an int64 where these are switched on


class Sizes(NamedTuple):
    """Static sizes: of the arrays, as packed, and of the blocks."""

    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    head: int  # channels of a head, padded
    pack: int  # heads in a block
    block_q: int
    block_kv: int

    @property
    def width(self) -> int:
        return self.head * self.pack

    @property
    def packs(self) -> int:
        return self.heads // self.pack

    @property
    def group(self) -> int:
        """Packs of query heads for each pack of key heads."""
        return max(1, self.heads // self.kv_heads // self.pack)

    @property
    def kv_packs(self) -> int:
        return self.packs // self.group

    @property
    def stats(self) -> tuple[int, ...]:
        """The shape of row statistics."""
        return self.batch, self.packs, self.pack, self.queries

    @property
    def q_blocks(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.keys // self.block_kv)


class How(NamedTuple):
    """All that is static."""

    rules: Rules
    sizes: Sizes
    q_len: bool  # whether there are lengths
    kv_len: bool
    segments: bool
    hides: bool  # whether a bias of -inf stands for a mask
    one_pass: bool  # whether dq has room on the chip, beside dk and dv


# -- arrays as blocks take them


def _pack_of(heads: int, kv_heads: int, head: int) -> int:
    """Heads in a block; 0 where the head has to be padded to whole lanes."""
    if head % LANES == 0:
        return 1
    pack = LANES // head if LANES % head == 0 else 0
    group = heads // kv_heads
    fits = pack and (kv_heads if group == 1 else group) % pack == 0
    return pack if fits else 0


def _block(length: int, block: int, name: str) -> int:
    if block % LANES:
        raise NotImplementedError(f"{name} is a multiple of {LANES}, got {block}")
    return min(block, -(-length // LANES) * LANES)


def _sizes(q, k, block_q: int, block_kv: int) -> Sizes:
    (batch, queries, heads, head), (keys, kv_heads) = q.shape, k.shape[1:3]
    pack = _pack_of(heads, kv_heads, head)
    if not pack:
        pack, head = 1, -(-head // LANES) * LANES
    blocks = _block(queries, block_q, "block_q"), _block(keys, block_kv, "block_kv")
    return Sizes(batch, queries, keys, heads, kv_heads, head, pack, *blocks)


def _check(q, bias) -> None:
    """NotImplementedError for what is not done."""
    if q.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"float32 and bfloat16, not {q.dtype}")
    if bias is not None and bias.dtype not in (jnp.float32, jnp.bfloat16):
        raise NotImplementedError(f"a bias of float32 or bfloat16, not {bias.dtype}")
    if q.shape[-1] > MOST_HEAD:
        raise NotImplementedError(f"heads of up to {MOST_HEAD}, not {q.shape[-1]}")


def how_for(rules: Rules, inputs: Inputs, bias, block_q, block_kv) -> How:
    """The static part, with the largest blocks that leave room.

    `bias`: as the kernel reads it, with the mask in it.
    """
    q, k = inputs.q, inputs.k
    _check(q, bias)
    options = [_sizes(q, k, block_q or size, block_kv or size) for size in BLOCKS]
    used = [_bytes_on_chip(sizes, q.dtype.itemsize, bias) for sizes in options]
    best = next((i for i, n in enumerate(used) if n <= CHIP_BYTES), -1)
    whole = used[best] + _bytes_of_dq(options[best], q.dtype.itemsize)
    return How(
        common.bounded(rules, q.shape[1], k.shape[1]),
        options[best],
        inputs.q_len is not None,
        inputs.kv_len is not None,
        inputs.q_segments is not None,
        inputs.mask is not None,
        whole <= CHIP_BYTES,
    )


def _bytes_on_chip(sizes: Sizes, itemsize: int, bias) -> int:
    """Of the dk and dv pass, which takes most: two buffers an array, sums, logits."""
    logits = sizes.block_q * sizes.block_kv
    rows_in_and_out = 2 * sizes.block_q + 4 * sizes.block_kv
    total = 2 * itemsize * rows_in_and_out * sizes.width
    total += 4 * 2 * sizes.block_kv * sizes.width
    total += 4 * 4 * logits
    if bias is not None and min(bias.shape[2:]) > 1:
        total += 2 * bias.dtype.itemsize * sizes.pack * logits
    return total


def _bytes_of_dq(sizes: Sizes, itemsize: int) -> int:
    """Of dq of a group's heads: a float32 sum, and two buffers to leave by."""
    rows = sizes.q_blocks * sizes.block_q
    return (4 + 2 * itemsize) * rows * sizes.group * sizes.width


def lanes(x, sizes: Sizes):
    """[b, t, n, h] as [b, t, n * h], heads padded."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, sizes.head - x.shape[3])))
    return x.reshape(*x.shape[:2], -1)


def repeats(sizes: Sizes) -> int:
    """How often a key head stands in its pack."""
    return sizes.pack if sizes.heads > sizes.kv_heads else 1


def kv_lanes(x, sizes: Sizes):
    """Keys or values, each head as often as a pack of the queries' heads needs it."""
    if repeats(sizes) > 1:
        x = jnp.repeat(x, sizes.pack, axis=2)
    return lanes(x, sizes)


def from_lanes(x, heads: int, head: int):
    """The inverse of `lanes`; where heads stand repeatedly, the first of each."""
    return x.reshape(*x.shape[:2], heads, -1)[..., :head]


def extras(sizes: Sizes, bias, inputs: Inputs) -> dict[str, Any]:
    """What a kernel may lack: segments, and the bias by its layout."""
    ins = _bias_by_lanes(bias, sizes.keys)
    if inputs.q_segments is not None:
        ins["q_segments"] = inputs.q_segments[:, None]
        ins["kv_segments"] = inputs.kv_segments[:, None]
    return ins


def _bias_by_lanes(bias, keys: int) -> dict[str, Any]:
    """The bias under the name of its layout: of both, of keys, or of queries alone."""
    if bias is None:
        return {}
    if bias.shape[2:] == (1, 1):
        bias = jnp.broadcast_to(bias, (*bias.shape[:3], keys))
    if bias.shape[2] == 1:
        return {"bias_of_keys": bias}
    if bias.shape[3] == 1:
        return {"bias_of_queries": jnp.swapaxes(bias, 2, 3)}
    return {"bias": bias}


class Scalars(NamedTuple):
    """What index maps and kernels read before a block comes; see `scalars_for`."""

    seed: Any
    q_len: Any
    kv_len: Any
    misses: Any
    q_spans: Any
    kv_spans: Any


def scalars_for(how: How, inputs: Inputs) -> Scalars:
    """Seed, lengths, which blocks of queries may miss all keys, segments of blocks.

    Those which may have a row that sees nothing are flags [b, q_blocks + 1], flat, with
    one for any block at the end.
    """
    sizes, q_len, kv_len = how.sizes, inputs.q_len, inputs.kv_len
    nothing = common.sees_nothing(how.rules, inputs)
    if nothing is None:
        misses = jnp.zeros((1,), jnp.int32)
    else:
        nothing = jnp.broadcast_to(nothing, (sizes.batch, sizes.queries))
        blocks = common.any_in_blocks(nothing, sizes.block_q)
        blocks = jnp.concatenate([blocks, blocks.any(axis=1, keepdims=True)], axis=1)
        misses = blocks.astype(jnp.int32)
    whole = lambda n: jnp.full((sizes.batch,), n, jnp.int32)
    spans = whole(0), whole(0)
    if how.segments:
        spans = (
            common.spans(inputs.q_segments, sizes.block_q),
            common.spans(inputs.kv_segments, sizes.block_kv),
        )
    return Scalars(
        jnp.zeros((2,), jnp.uint32) if inputs.seed is None else inputs.seed,
        whole(sizes.queries) if q_len is None else jnp.minimum(q_len, sizes.queries),
        whole(sizes.keys) if kv_len is None else kv_len,
        misses.reshape(-1),
        *(x.reshape(-1) for x in spans),
    )


# -- which blocks are visited


def visited(how: How, scalars: Scalars, at):
    """Whether the block of queries visits the block of keys at this point."""
    first, last = _visited_keys(how, scalars, at.b, at.i)
    inside = (first <= at.j) & (at.j <= last)
    if not how.segments:
        return inside
    q = 2 * (at.b * how.sizes.q_blocks + at.i)
    kv = 2 * (at.b * how.sizes.kv_blocks + at.j)
    below = scalars.q_spans[q] <= scalars.kv_spans[kv + 1]
    meet = below & (scalars.kv_spans[kv] <= scalars.q_spans[q + 1])
    return inside & (meet | _misses(how, scalars, at.b, at.i))


def _visited_keys(how: How, scalars: Scalars, b, i):
    """(first, last) block of keys, by position, that block i of queries visits."""
    sizes, start = how.sizes, i * how.sizes.block_q
    end = jnp.minimum(start + sizes.block_q, sizes.queries) - 1
    low, high = common.keys_seen(how.rules, start, end, sizes.keys, scalars.kv_len[b])
    low, high = _blocks(low, high, sizes.block_kv)
    low, high = _all_if_missing(how, scalars, b, i, low, high, sizes.kv_blocks)
    return low, jnp.where(start < scalars.q_len[b], high, low - 1)


def _all_if_missing(how: How, scalars: Scalars, b, i, low, high, blocks: int):
    if scalars.misses.shape == (1,):
        return low, high
    misses = _misses(how, scalars, b, i)
    return jnp.where(misses, ZERO, low), jnp.where(misses, np.int32(blocks - 1), high)


def _misses(how: How, scalars: Scalars, b, i):
    return scalars.misses[b * (how.sizes.q_blocks + 1) + i] != 0


def _visited_queries(how: How, scalars: Scalars, b, j):
    """(first, last) block of queries that block j of keys may be visited by."""
    sizes, start = how.sizes, j * how.sizes.block_kv
    end = jnp.minimum(start + sizes.block_kv, sizes.keys) - 1
    q_len = scalars.q_len[b]
    low, high = common.queries_seeing(how.rules, start, end, sizes.queries, q_len)
    low, high = _blocks(low, high, sizes.block_q)
    n = sizes.q_blocks
    return _all_if_missing(how, scalars, b, n, low, high, n)


def _blocks(low, high, size: int):
    """Blocks of positions low..high, which may be none."""
    none = low > high
    low = jax.lax.div(jnp.maximum(low, 0), jnp.int32(size))
    high = jax.lax.div(jnp.maximum(high, 0), jnp.int32(size))
    return low, jnp.where(none, low - 1, high)


def _nearest(i, low, high, blocks: int):
    """Block i, or the one next to it that is visited: what is there needs no fetch."""
    i = jnp.minimum(jnp.maximum(i, low), high)
    return jnp.minimum(jnp.maximum(i, 0), blocks - 1)


# -- grids


class At(NamedTuple):
    """A point of the grid: batch, pack of query heads and of key heads, and blocks."""

    b: Any
    pack: Any
    i: Any
    kv_pack: Any
    j: Any


class Order(NamedTuple):
    """A grid: its size, the point that an index is, and what is fetched there."""

    grid: tuple[int, ...]
    at: Callable[..., At]
    fetched: Callable[..., At]


def queries_outside(how: How) -> Order:
    """For each block of queries the blocks of keys in sequence."""
    sizes = how.sizes

    def at(b, pack, i, j):
        return At(b, pack, i, jax.lax.div(pack, jnp.int32(sizes.group)), j)

    def fetched(b, pack, i, j, *refs):
        low, high = _visited_keys(how, Scalars(*refs), b, i)
        return at(b, pack, i, _nearest(j, low, high, sizes.kv_blocks))

    grid = sizes.batch, sizes.packs, sizes.q_blocks, sizes.kv_blocks
    return Order(grid, at, fetched)


def keys_outside(how: How) -> Order:
    """For each block of keys the blocks of queries, of all heads that share them."""
    sizes = how.sizes

    def at(b, kv_pack, j, n):
        pack = kv_pack * sizes.group + jax.lax.div(n, jnp.int32(sizes.q_blocks))
        return At(b, pack, jax.lax.rem(n, jnp.int32(sizes.q_blocks)), kv_pack, j)

    def fetched(b, kv_pack, j, n, *refs):
        low, high = _visited_queries(how, Scalars(*refs), b, j)
        point = at(b, kv_pack, j, n)
        return point._replace(i=_nearest(point.i, low, high, sizes.q_blocks))

    grid = sizes.batch, sizes.kv_packs, sizes.kv_blocks, sizes.group * sizes.q_blocks
    return Order(grid, at, fetched)


def _block_of(name: str, how: How, shape) -> tuple[tuple[int, ...], Callable]:
    """The shape of a block of the array of this name, and its index at a point."""
    sizes = how.sizes
    if name in ("q", "g", "dq", "o"):
        return (1, sizes.block_q, sizes.width), lambda at: (at.b, at.i, at.pack)
    if name in ("k", "v", "dk", "dv"):
        return (1, sizes.block_kv, sizes.width), lambda at: (at.b, at.j, at.kv_pack)
    if name == "dq_of_group":
        block = 1, sizes.q_blocks * sizes.block_q, sizes.group * sizes.width
        return block, lambda at: (at.b, ZERO, at.kv_pack)
    if name in ("top", "log_total", "delta"):
        return (1, 1, sizes.pack, sizes.block_q), lambda at: (at.b, at.pack, ZERO, at.i)
    if name == "q_segments":
        return (1, 1, sizes.block_q), lambda at: (at.b, ZERO, at.i)
    if name == "kv_segments":
        return (1, 1, sizes.block_kv), lambda at: (at.b, ZERO, at.j)
    return _block_of_bias(name, how, shape)


def _block_of_bias(name: str, how: How, shape):
    batched, by_head = shape[0] > 1, shape[1] > 1
    t, s = {
        "bias": (how.sizes.block_q, how.sizes.block_kv),
        "bias_of_keys": (1, how.sizes.block_kv),
        "bias_of_queries": (1, how.sizes.block_q),
    }[name]

    def index(at):
        lead = at.b if batched else ZERO, at.pack if by_head else ZERO
        last = at.i if name == "bias_of_queries" else at.j
        return *lead, at.i if name == "bias" else ZERO, last

    return (1, how.sizes.pack if by_head else 1, t, s), index


def _spec(name: str, how: How, order: Order, shape) -> pl.BlockSpec:
    block, index = _block_of(name, how, shape)
    return pl.BlockSpec(block, lambda *grid: index(order.fetched(*grid)))


def call(name: str, kernel, how: How, order: Order, scalars, ins, outs, scratch):
    """`kernel(at, scalars, ins, outs, scratch)` at each point of the grid."""

    def body(*refs):
        at = order.at(*(pl.program_id(axis) for axis in range(4)))
        ins, outs, *scratch = refs[len(scalars) :]
        kernel(how, at, Scalars(*refs[: len(scalars)]), ins, outs, scratch)

    specs = {n: _spec(n, how, order, x.shape) for n, x in (ins | outs).items()}
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=len(scalars),
            grid=order.grid,
            in_specs=[{n: specs[n] for n in ins}],
            out_specs={n: specs[n] for n in outs},
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=outs,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary", "arbitrary")
        ),
        cost_estimate=_cost(how, ins, outs),
        name=name,
    )(*scalars, ins)


_PRODUCTS = {"o": 1, "dq": 1, "dq_of_group": 1, "dk": 1, "dv": 1, "delta": 1}


def _cost(how: How, ins, outs) -> pl.CostEstimate:
    """A product for the logits, one for each sum, one for their gradient."""
    arrays = ins | outs
    sizes, products = how.sizes, 1 + sum(_PRODUCTS.get(name, 0) for name in arrays)
    logits = sizes.batch * sizes.heads * sizes.queries * sizes.keys
    logits = logits // 2 if how.rules.causal else logits
    return pl.CostEstimate(
        flops=2 * products * logits * sizes.head,
        transcendentals=logits,
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in arrays.values()),
    )
