"""The static part of a call of attention's kernels on Hopper: shapes and tiles."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from pallas_kernels.attention.gpu.dropout import LARGEST_RATE
from pallas_kernels.attention.inputs import Inputs, Rules, bounded

# (queries, keys) of a warpgroup's tile: the largest for which there are registers.
TILES = {"forward": (128, 64), "dq": (64, 64), "dkv": (64, 64), "dbias": (64, 64)}
# Of two warpgroups, which have more registers: in general, for heads of 64, and for
# those where neither a mask nor dropout takes registers.
OF_TWO = {"forward": (64, 128), "dq": (64, 64), "dkv": (64, 64)}
OF_TWO_SMALL = {"dq": (64, 128)}
OF_TWO_BARE = {"forward": (128, 128), "dkv": (128, 64)}
# With a bias or a mask of pairs, for which shared memory must have room, and of heads
# of 64 in the forward pass; words of a mask are of 64 keys.
OF_TWO_PAIRS, OF_TWO_BIAS, OF_TWO_MASK = (64, 64), (64, 128), (128, 64)
# From how many streamed positions on two warpgroups share a stream: the second-level
# cache then sends half as much, but one program of them has a processor to itself.
SHARED_FROM = 512
BLOCK = 64  # the rows of a warpgroup's product
_TILING = 8  # rows that shared memory holds together


class GpuCase(NamedTuple):
    """The static part of a call.

    Attributes:
      block_q, block_kv: queries and keys of a program's block.
      across: the axis of queries in a tile of logits: 0 if they stay and keys stream.
      warpgroups: of a program, which divide the block that stays among them.
      hides: whether a bias of `FLOOR` or less stands for a mask, which is the same
        for all queries.
    """

    rules: Rules
    batch: int
    queries: int
    keys: int
    heads: int
    kv_heads: int
    size: int
    dtype: Any
    block_q: int
    block_kv: int
    across: int
    warpgroups: int
    hides: bool

    @property
    def tile(self) -> tuple[int, int]:
        """Rows and columns of a warpgroup's tile of logits: what stays comes first."""
        sizes = self.block_q, self.block_kv
        return sizes[self.across] // self.warpgroups, sizes[1 - self.across]

    @property
    def of_tile(self) -> tuple[int, int]:
        """Queries and keys of a warpgroup's tile."""
        rows, columns = self.tile
        return (columns, rows) if self.across else (rows, columns)

    @property
    def launched(self) -> int:
        """Warpgroups of a program, with the one that copies for two others."""
        return self.warpgroups + (self.warpgroups > 1)

    @property
    def q_blocks(self) -> int:
        return -(-self.queries // self.block_q)

    @property
    def kv_blocks(self) -> int:
        return -(-self.keys // self.block_kv)

    @property
    def group(self) -> int:
        """Query heads for each key head."""
        return self.heads // self.kv_heads

    @property
    def rows(self) -> tuple[int, int, int]:
        """The shape of a number for each query and head, whole blocks of queries."""
        return self.batch, self.heads, self.q_blocks * self.block_q


def make_case(rules: Rules, inputs: Inputs, kernel: str, tile) -> GpuCase:
    """The static part; NotImplementedError for what the kernels do not support.

    Args:
      kernel: "forward", "dq", "dkv" or "dbias".
      tile: (queries, keys) of a warpgroup's tile, each None for a default.
    """
    q = inputs.q
    batch, queries, heads, size = q.shape
    keys, kv_heads = inputs.k.shape[1:3]
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        raise NotImplementedError(f"bfloat16 and float16 alone, not {q.dtype}")
    if size not in (64, 128):
        raise NotImplementedError(f"heads of 64 and 128 alone, not of {size}")
    if queries % _TILING or keys % _TILING:
        lengths = f"{queries} queries and {keys} keys"
        raise NotImplementedError(
            f"lengths that {_TILING} divides alone, not {lengths}"
        )
    if rules.rate > LARGEST_RATE:
        raise NotImplementedError(f"rates up to {LARGEST_RATE} alone, not {rules.rate}")
    across = 1 if kernel == "dkv" else 0
    # Streams of the gradient of a bias are of heads, which are few (`bias`).
    shared = kernel != "dbias" and (inputs.k, q)[across].shape[1] >= SHARED_FROM
    warpgroups = 2 if shared else 1
    rules = bounded(rules, queries, keys)
    default = _default_tile(kernel, rules, inputs, warpgroups)
    sizes = [a or b for a, b in zip(tile, default, strict=True)]
    if any(x % BLOCK for x in sizes):
        blocks = "{} queries and {} keys".format(*sizes)
        raise NotImplementedError(f"blocks that {BLOCK} divides alone, not {blocks}")
    sizes[across] *= warpgroups
    shape = batch, queries, keys, heads, kv_heads, size, q.dtype
    mask = inputs.extras.mask
    hides = mask is not None and mask.shape[2] == 1
    fixed = {"across": across, "warpgroups": warpgroups, "hides": hides}
    return GpuCase(rules, *shape, block_q=sizes[0], block_kv=sizes[1], **fixed)


def _default_tile(
    kernel: str, rules: Rules, inputs: Inputs, warpgroups: int
) -> tuple[int, int]:
    if warpgroups == 1:
        return TILES[kernel]
    small, extras = inputs.q.shape[3] == 64, inputs.extras
    bias, mask = (x is not None and x.shape[2] > 1 for x in (inputs.bias, extras.mask))
    if bias or mask:
        of_small = OF_TWO_MASK if mask else OF_TWO_BIAS
        return of_small if small and kernel == "forward" else OF_TWO_PAIRS
    hiding = extras._replace(q_len=None, seed=None)
    nothing = all(x is None for x in (inputs.bias, rules.window, *hiding))
    bare = nothing and not rules.causal and not rules.rate
    tiles = OF_TWO | (OF_TWO_SMALL if small else {})
    return (tiles | (OF_TWO_BARE if small and bare else {}))[kernel]
