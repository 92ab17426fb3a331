"""What attention's kernels on a TPU are given: arrays as blocks take them, scalars.

Heads lie side by side in the lanes, [b, t, n * h], and a block has a pack of heads: as
many as fill 128 lanes. Where there are fewer key heads than query heads, each key head
is repeated until it fills a pack.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels import chips
from pallas_kernels.arrays import LANES, check_dtypes
from pallas_kernels.attention import inputs as common
from pallas_kernels.attention.inputs import Inputs, Rules

BLOCKS = 512, 256, 128  # the first for which there is room on the chip is taken
MOST_HEAD = 256
# Bytes of on-chip memory that a kernel asks for at most; what every chip has. What a
# kernel does not ask for XLA uses for arrays.
MOST_VMEM, LEAST_VMEM = 60 * chips.MIB, 16 * chips.MIB


class BlockSizes(NamedTuple):
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


class TpuCase(NamedTuple):
    """The static part of a call."""

    rules: Rules
    sizes: BlockSizes
    q_len: bool  # whether there are lengths
    kv_len: bool
    segments: bool
    hides: bool  # whether a bias of -inf stands for a mask
    one_pass: bool  # whether there is room for dq on the chip, beside dk and dv
    vmem: int  # bytes of the chip's memory that the pass with dq, dk and dv asks for


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


def _sizes(q, k, block_q: int, block_kv: int) -> BlockSizes:
    (batch, queries, heads, head), (keys, kv_heads) = q.shape, k.shape[1:3]
    pack = _pack_of(heads, kv_heads, head)
    if not pack:
        pack, head = 1, -(-head // LANES) * LANES
    blocks = _block(queries, block_q, "block_q"), _block(keys, block_kv, "block_kv")
    return BlockSizes(batch, queries, keys, heads, kv_heads, head, pack, *blocks)


def biases_of(inputs: Inputs) -> dict[str, Any]:
    """By name, what is added to the logits: "bias", and a mask as one of 0 or -inf.

    A mask is a part of the bias, or "mask" where together they would be larger.
    """
    bias, mask = inputs.bias, inputs.extras.mask
    if bias is None and mask is None:
        return {}
    if bias is not None and mask is not None:
        both = jnp.broadcast_shapes(bias.shape, mask.shape)
        if both not in (bias.shape, mask.shape):
            return {"bias": bias, "mask": inputs._replace(bias=None).masked_bias()}
    return {"bias": inputs.masked_bias()}


def _check(q, biases: dict[str, Any]) -> None:
    """Raises NotImplementedError for what is not supported."""
    check_dtypes(("float32", "bfloat16"), q)
    for x in biases.values():
        if x.dtype not in (jnp.float32, jnp.bfloat16):
            raise NotImplementedError(f"a bias of float32 or bfloat16, not {x.dtype}")
    if q.shape[-1] > MOST_HEAD:
        raise NotImplementedError(f"heads of up to {MOST_HEAD}, not {q.shape[-1]}")


def case_for(
    rules: Rules,
    inputs: Inputs,
    biases: dict[str, Any],
    blocks,
    more: Callable[..., int] | None = None,
) -> TpuCase:
    """The static part, with the largest blocks that there is room for.

    Args:
      biases: those of `biases_of`.
      blocks: sizes that were asked for.
      more: function of the sizes to the bytes that a kernel needs besides.
    """
    block_q, block_kv = blocks
    q, k = inputs.q, inputs.k
    _check(q, biases)
    options = [_sizes(q, k, block_q or size, block_kv or size) for size in BLOCKS]
    used = [_bytes_on_chip(sizes, q.dtype.itemsize, biases) for sizes in options]
    if more is not None:
        used = [n + more(sizes) for n, sizes in zip(used, options, strict=True)]
    room = LEAST_VMEM * 15 // 16
    best = next((i for i, n in enumerate(used) if n <= room), -1)
    whole = used[best] + _bytes_of_dq(options[best], q.dtype.itemsize)
    return TpuCase(
        common.bounded(rules, q.shape[1], k.shape[1]),
        options[best],
        inputs.extras.q_len is not None,
        inputs.extras.kv_len is not None,
        inputs.extras.q_segments is not None,
        inputs.extras.mask is not None,
        whole <= _vmem() * 15 // 16,
        max(LEAST_VMEM, whole * 16 // 15),
    )


def _vmem() -> int:
    """Bytes that a kernel may use of a core's memory, on the chip traced for."""
    return min(chips.vmem_in_context() or LEAST_VMEM, MOST_VMEM)


def _bytes_on_chip(sizes: BlockSizes, itemsize: int, biases) -> int:
    """Of the dk and dv pass, which takes most: two buffers an array, sums, logits."""
    logits = sizes.block_q * sizes.block_kv
    rows_in_and_out = 2 * sizes.block_q + 4 * sizes.block_kv
    total = 2 * itemsize * rows_in_and_out * sizes.width
    total += 4 * 2 * sizes.block_kv * sizes.width
    total += 4 * 4 * logits
    for x in biases.values():
        if min(x.shape[2:]) > 1:
            total += 2 * x.dtype.itemsize * sizes.pack * logits
    return total


def _bytes_of_dq(sizes: BlockSizes, itemsize: int) -> int:
    """Of dq of a group's heads: a float32 sum, and two buffers to leave by."""
    rows = sizes.q_blocks * sizes.block_q
    return (4 + 2 * itemsize) * rows * sizes.group * sizes.width


def lanes(x, sizes: BlockSizes):
    """[b, t, n, h] as [b, t, n * h], heads padded."""
    x = jnp.pad(x, ((0, 0), (0, 0), (0, 0), (0, sizes.head - x.shape[3])))
    return x.reshape(*x.shape[:2], -1)


def repeats(sizes: BlockSizes) -> int:
    """TpuCase often a key head stands in its pack."""
    return sizes.pack if sizes.heads > sizes.kv_heads else 1


def kv_lanes(x, sizes: BlockSizes):
    """Keys or values, each head as often as a pack of the queries' heads needs it."""
    if repeats(sizes) > 1:
        x = jnp.repeat(x, sizes.pack, axis=2)
    return lanes(x, sizes)


def from_lanes(x, heads: int, head: int):
    """The inverse of `lanes`; where heads stand repeatedly, the first of each."""
    return x.reshape(*x.shape[:2], heads, -1)[..., :head]


def optional(sizes: BlockSizes, biases, inputs: Inputs) -> dict[str, Any]:
    """The arrays that a call may lack: segments, and biases by their layout."""
    ins = {}
    for name, x in biases.items():
        layout, x = _by_lanes(x, sizes.keys)
        ins[name + layout] = x
    if inputs.extras.q_segments is not None:
        ins["q_segments"] = inputs.extras.q_segments[:, None]
        ins["kv_segments"] = inputs.extras.kv_segments[:, None]
    return ins


def _by_lanes(bias, keys: int) -> tuple[str, Any]:
    """The layout, as a suffix: of both, of keys, or of queries alone; and the bias."""
    if bias.shape[2:] == (1, 1):
        bias = jnp.broadcast_to(bias, (*bias.shape[:3], keys))
    if bias.shape[2] == 1:
        return "_of_keys", bias
    if bias.shape[3] == 1:
        return "_of_queries", jnp.swapaxes(bias, 2, 3)
    return "", bias


class Scalars(NamedTuple):
    """What index maps and kernels read before a block comes; see `scalars_for`."""

    seed: Any
    q_len: Any
    kv_len: Any
    misses: Any
    q_spans: Any
    kv_spans: Any


def scalars_for(case: TpuCase, inputs: Inputs) -> Scalars:
    """Seed, lengths, which blocks of queries may miss all keys, segments of blocks.

    Those which may have a row that sees nothing are flags [b, q_blocks + 1], flat, with
    one for any block at the end.
    """
    sizes, q_len, kv_len = case.sizes, inputs.extras.q_len, inputs.extras.kv_len
    nothing = common.sees_nothing(case.rules, inputs)
    if nothing is None:
        misses = jnp.zeros((1,), jnp.int32)
    else:
        nothing = jnp.broadcast_to(nothing, (sizes.batch, sizes.queries))
        blocks = common.any_in_blocks(nothing, sizes.block_q)
        blocks = jnp.concatenate([blocks, blocks.any(axis=1, keepdims=True)], axis=1)
        misses = blocks.astype(jnp.int32)
    whole = lambda n: jnp.full((sizes.batch,), n, jnp.int32)
    spans = whole(0), whole(0)
    if case.segments:
        spans = (
            common.spans(inputs.extras.q_segments, sizes.block_q),
            common.spans(inputs.extras.kv_segments, sizes.block_kv),
        )
    return Scalars(
        jnp.zeros((2,), jnp.uint32)
        if inputs.extras.seed is None
        else inputs.extras.seed,
        whole(sizes.queries) if q_len is None else jnp.minimum(q_len, sizes.queries),
        whole(sizes.keys) if kv_len is None else kv_len,
        misses.reshape(-1),
        *(x.reshape(-1) for x in spans),
    )
