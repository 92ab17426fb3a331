"""What attention's programs on Hopper are made of: products, and tiles of logits.

A tile of logits lies in registers as tensor cores leave it, with queries along its
first axis (`across == 0`) or its second. Two warpgroups of a program have a tile each,
of the same streamed block. Tensor cores take the left operand of the next
product from registers, and the axis it sums over must lie along that operand's rows.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import simulated_platform
from pallas_kernels.arrays import dot
from pallas_kernels.attention.gpu.dropout import drop
from pallas_kernels.attention.gpu.grid import Grid, make_grid
from pallas_kernels.attention.gpu.ring import Span, Stream, with_ring
from pallas_kernels.attention.gpu.tables import (
    FLOOR,
    WORD,
    GpuCase,
    MaskTables,
    in_base_2,
    masks_all,
)
from pallas_kernels.attention.gpu.turns import Turns
from pallas_kernels.attention.inputs import all_of
from pallas_kernels.gpu import TILED, Named, launch, load_once, spread, store
from pallas_kernels.hashing import half_of, kept

MASK_WORDS = "mask_low", "mask_high"  # of a tile of 64 keys
OF_PAIRS = "bias_tile", *MASK_WORDS  # of which each warpgroup has its own


def product(a, b, meanwhile: Callable[[], None] | None = None):
    """a b' of two tiles in shared memory; float32. `meanwhile` runs before its end."""
    meanwhile = meanwhile or (lambda: None)
    if simulated_platform():
        meanwhile()
        return dot(a[...], b[...], (1, 1))

    def multiply(acc):
        plgpu.wgmma(acc, a, b.transpose((1, 0)))
        meanwhile()
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def accumulate(acc, a, b):
    """acc + a b, for `a` in registers and `b` in shared memory."""
    if simulated_platform():
        # The simulator supports no left operand in registers.
        return acc + dot(a, b[...], (1, 0))
    add = pl.run_state(lambda ref: plgpu.wgmma(ref, a, b))
    return add(plgpu.ACC.init(acc))


class LogitsTile(NamedTuple):
    """A tile of logits: its vectors by query and by key, and where its keys start."""

    case: GpuCase
    per_query: Named
    per_key: Named
    first_key: Any
    masked: bool  # whether some query does not see some key
    got: Named  # what streams, in shared memory, with "bias_tile" and "mask" or not

    @property
    def shape(self) -> tuple[int, int]:
        return self.case.tile

    @property
    def across(self) -> int:
        return self.case.across

    @property
    def has_bias(self) -> bool:
        return "bias_tile" in self.got or "bias" in self.per_key

    def of_queries(self, vector):
        return spread(vector, self.shape, self.across)

    def of_keys(self, vector):
        return spread(vector, self.shape, 1 - self.across)

    def _key(self):
        return lax.broadcasted_iota(jnp.int32, self.shape, 1 - self.across)

    def _conditions(self):
        limits = self.per_query
        if "high" in limits:
            yield self._key() <= self.of_queries(limits["high"] - self.first_key)
        if "low" in limits:
            yield self._key() >= self.of_queries(limits["low"] - self.first_key)
        if "q_segment" in limits:
            segment = self.of_keys(self.per_key["kv_segment"])
            yield self.of_queries(limits["q_segment"]) == segment
        if self.case.hides:
            yield self.of_keys(self.per_key["bias"]) > np.float32(FLOOR)
        if "mask_low" in self.got:
            yield self._bits() == np.uint32(1)

    def _bits(self):
        """The mask's, from two words of each query."""
        low, high = (self.of_queries(self.got[x][...]) for x in MASK_WORDS)
        key = self._key()
        word = jnp.where(key < np.int32(WORD), low, high)
        bit = (key & np.int32(WORD - 1)).astype(jnp.uint32)
        return (word >> bit) & np.uint32(1)

    def _bias(self):
        """The bias in base 2, or None; without a mask of keys that is apart from it."""
        if "bias_tile" in self.got:
            return in_base_2(self.got["bias_tile"][...].astype(jnp.float32))
        if "bias" in self.per_key:
            return self.of_keys(self.per_key["bias"])
        return None

    def seen(self):
        """Where a query sees a key; None where all do."""
        return all_of(self._conditions()) if self.masked else None

    @property
    def _scale(self):
        return np.float32(self.case.rules.scale / math.log(2))

    def logits(self, products, seen):
        """Scaled, with bias and masks, in base 2; -inf for keys that are not there."""
        x = products * self._scale
        if (bias := self._bias()) is not None:
            x = x + bias
        if seen is not None:
            x = jnp.where(seen, x, np.float32(FLOOR))
        if self.masked and self.case.keys % self.case.block_kv:
            there = self._key() < self.case.keys - self.first_key
            x = jnp.where(there, x, np.float32(-np.inf))
        return x

    def row_max(self, products, x):
        """Row maxima of `x`; from the products if that is the same and cheaper."""
        if self.masked or self.has_bias or self._scale < 0:
            return x.max(axis=1)
        return products.max(axis=1) * self._scale

    def _words(self):
        """Two of each query, and one of each key."""
        rows = [self.of_queries(self.per_query[x]) for x in ("factor", "term")]
        return rows, self.of_keys(self.per_key["word"])

    def _keep(self):
        """Where dropout keeps an element."""
        half = half_of(self._key().astype(jnp.uint32))  # blocks start at even keys
        return kept(*self._words(), half, self.case.rules.rate)

    def dropped(self, x):
        """`x` with zeros where dropout has them."""
        if not self.case.rules.rate:
            return x
        if self.across or simulated_platform():
            return jnp.where(self._keep(), x, jnp.zeros((), x.dtype))
        (factor, term), word = self._words()
        return drop(x, factor * word + term, self.case.rules.rate)

    @property
    def factor(self):
        """1 / (1 - rate), of the elements that dropout keeps; None without it."""
        rate = self.case.rules.rate
        return np.float32(1 / (1 - rate)) if rate else None

    def share(self):
        """What dropout multiplies elements by: 0 or `factor`. None without it."""
        # Multiplied by twice, it is cheaper than a mask, for which there are too few
        # predicate registers.
        if self.factor is None:
            return None
        return jnp.where(self._keep(), self.factor, np.float32(0))


def row_at(ref, b, n) -> tuple[Any, Any]:
    """The indices of a sequence and a head in [b|1, n|1, ...]."""
    return b if ref.shape[0] > 1 else 0, n if ref.shape[1] > 1 else 0


def bounds(refs: Named, b, i) -> list:
    """The four numbers that "blocks" has for block `i` that stays."""
    ref = refs["blocks"]
    row = b if ref.shape[0] > 1 else 0
    return [ref[row, i, x] for x in range(4)]


def spans(bounds: list, all_masked: bool) -> list[Span]:
    """Loops with a mask, without one, and with one, between bounds as in "blocks".

    There is no loop between two bounds that are one object, or the same number.
    """
    first, whole, past, stop = bounds
    if all_masked:
        return [Span(first, stop, True)]
    parts = Span(first, whole, True), Span(whole, past, False), Span(past, stop, True)
    return [x for x in parts if not _is_empty(x)]


def _is_empty(span: Span) -> bool:
    known = isinstance(span.first, int) and isinstance(span.stop, int)
    return span.first is span.stop or (known and span.first == span.stop)


def _key_spans(case: GpuCase, refs: Named, tables: MaskTables, b, i) -> list[Span]:
    """What block `i` of the queries visits."""
    masked = masks_all(case, tables)
    if "blocks" not in refs:
        return spans([0, 0, case.keys // case.block_kv, case.kv_blocks], masked)
    first, whole, past, stop = bounds(refs, b, i)
    # Without a window the first key is visible to all.
    return spans([first, whole if case.rules.window else first, past, stop], masked)


def over_keys(
    name: str,
    case: GpuCase,
    arrays: Named,
    tables: MaskTables,
    outs: Named,
    start: Callable,
    step: Callable,
    end: Callable,
    in_turns: bool = False,
) -> dict[str, jax.Array]:
    """A kernel in which a block of queries stays, and keys and values stream past it.

    Args:
      arrays: k and v, q, and what else stays as q does.
      outs: the first like q, written where q was; others like `case.rows`.
      start: makes the first carry.
      step: function of (tile, tiles that stay, k, v, carry, turns) to the next carry.
      end: function of the last carry to blocks of the outs, by name.
      in_turns: whether a step changes the turns, where there are two warpgroups.
    """
    stay = tuple(x for x in arrays if x not in ("k", "v"))
    inputs = arrays | tables.per_query | tables.per_key | tables.rest
    first_out, *vectors = outs
    once = (*stay, *tables.per_query)
    scratch = scratch_of(case, stay, tables.per_query | {x: outs[x] for x in vectors})
    arrived = plgpu.Barrier(num_arrivals=len(once), num_barriers=case.warpgroups)
    local = {f"{x}_here": ref for x, ref in scratch.items()} | {"arrived": arrived}
    if in_turns and case.warpgroups == 2:
        local["turn"] = plgpu.Barrier(num_arrivals=2)

    def stream(refs, b, n, block):
        # The last block takes longest with a causal mask, so it is started first.
        i = case.q_blocks - 1 - block
        rows, mine = rows_of_warpgroup(case, i)

        def part(x):
            ref = refs[x]
            if x in stay or x == first_out:
                return ref.at[b, rows, n]
            return ref.at[(*row_at(ref, b, n), rows)]

        here = {x: refs[f"{x}_here"].at[mine] for x in scratch}
        loops, turns = _key_spans(case, refs, tables, b, i), Turns(refs.get("turn"))

        def visit(masked, queries, j, got, carry):
            keys = {x: got[x][...] for x in tables.per_key}
            position = j * case.block_kv
            tile = LogitsTile(case, queries, keys, position, masked, got)
            return step(tile, here, got["k"], got["v"], carry, turns)

        def visit_all(ring, queries):
            carry = start()
            for loop in loops:
                carry = ring.visit(loop, partial(visit, loop.masked, queries), carry)
            return carry

        def read(ring):
            load_once([(part(x), here[x]) for x in once], refs["arrived"].at[mine])
            queries = {x: here[x][...] for x in tables.per_query}
            carry = turns.run(partial(visit_all, ring, queries))
            here[first_out] = here["q"]
            for x, value in end(carry).items():
                here[x][...] = value.astype(outs[x].dtype)
            store([(here[x], part(x)) for x in outs])

        sources = _key_sources(case, refs, tables, b, n, i)
        return Stream(sources, loops[0].first, loops[-1].stop, read)

    def program(refs):
        shapes = _key_shapes(case, tables)
        with_ring(grid, partial(stream, refs), shapes, case.warpgroups, OF_PAIRS)

    sizes = {"batch": case.batch, "heads": case.heads, "blocks": case.q_blocks}
    grid = grid_of(case, tables, sizes)
    launched = grid.launched, local, TILED, case.launched
    return launch(name, program, inputs, outs, *launched)


def grid_of(case: GpuCase, tables: MaskTables, sizes: dict[str, int]) -> Grid:
    """Of what stays, for programs that may take many blocks if they are of two."""
    if case.warpgroups == 1:  # then others of its processor work while one starts
        return Grid(sizes)
    return make_grid(sizes, "blocks" not in tables.rest)


def rows_of_warpgroup(case: GpuCase, block) -> tuple[Any, Any]:
    """The positions of this warpgroup in a block that stays, and its number."""
    rows, of_program = case.tile[0], case.tile[0] * case.warpgroups
    mine = lax.axis_index("warpgroup") if case.warpgroups > 1 else 0
    return pl.ds(block * of_program + mine * rows, rows), mine


def scratch_of(case: GpuCase, blocks, vectors: Named) -> Named:
    """Shared memory for each warpgroup's rows that stay, and for vectors over them."""
    own = case.warpgroups, case.tile[0]
    scratch: Named = {x: plgpu.SMEM((*own, case.size), case.dtype) for x in blocks}
    return scratch | {x: plgpu.SMEM(own, y.dtype) for x, y in vectors.items()}


def _key_sources(case: GpuCase, refs: Named, tables: MaskTables, b, n, i):
    """What is copied for block j of the keys, for block `i` of head `n`'s queries."""
    kv_head = lax.div(n, np.int32(case.group))
    keys = lambda j: pl.ds(j * case.block_kv, case.block_kv)
    sources: dict[str, Callable] = {
        x: lambda j, ref=refs[x]: ref.at[b, keys(j), kv_head] for x in ("k", "v")
    }
    for x in tables.per_key:
        sources[x] = lambda j, ref=refs[x]: ref.at[(*row_at(ref, b, n), keys(j))]

    def rows(mine):
        of_tile = case.tile[0]
        return pl.ds(i * case.block_q + mine * of_tile, of_tile)

    if "bias_tile" in tables.rest:
        bias = refs["bias_tile"]
        sources["bias_tile"] = lambda j, mine: bias.at[
            (*row_at(bias, b, n), rows(mine), keys(j))
        ]
    if "mask" in tables.rest:
        mask = refs["mask"]
        for which, x in enumerate(MASK_WORDS):
            sources[x] = lambda j, mine, which=which: mask.at[
                (*row_at(mask, b, n), 2 * j + which, rows(mine))
            ]
    return sources


def _key_shapes(case: GpuCase, tables: MaskTables) -> Named:
    """The tiles of `_key_sources`."""
    tile = jax.ShapeDtypeStruct((case.block_kv, case.size), case.dtype)
    shapes: Named = {"k": tile, "v": tile}
    for x, table in tables.per_key.items():
        shapes[x] = jax.ShapeDtypeStruct((case.block_kv,), table.dtype)
    return shapes | shapes_of_pairs(case, tables)


def shapes_of_pairs(case: GpuCase, tables: MaskTables) -> Named:
    """The tiles of what differs among pairs."""
    if "bias_tile" not in tables.rest:
        return word_shapes(case, tables)
    tile = jax.ShapeDtypeStruct(case.tile, tables.rest["bias_tile"].dtype)
    return {"bias_tile": tile} | word_shapes(case, tables)


def word_shapes(case: GpuCase, tables: MaskTables) -> Named:
    """Of a mask, which is copied in two words for each query of a tile."""
    words = jax.ShapeDtypeStruct(case.of_tile[:1], jnp.uint32)
    return dict.fromkeys(MASK_WORDS, words) if "mask" in tables.rest else {}
