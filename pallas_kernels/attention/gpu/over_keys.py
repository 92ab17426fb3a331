"""The programs of attention's kernels in which queries stay and keys stream past."""

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.attention.gpu.case import GpuCase
from pallas_kernels.attention.gpu.cost import cost_of
from pallas_kernels.attention.gpu.grid import Grid
from pallas_kernels.attention.gpu.logits import MASK_WORDS, LogitsTile
from pallas_kernels.attention.gpu.pingpong import PingPong
from pallas_kernels.attention.gpu.ring import Ring, Span, Stream, with_ring
from pallas_kernels.attention.gpu.streams import (
    OF_PAIRS,
    bounds,
    grid_of,
    row_at,
    rows_of,
    rows_of_warpgroup,
    scratch_of,
    shapes_of,
    shapes_of_pairs,
    spans,
)
from pallas_kernels.attention.gpu.tables import MaskTables, masks_all
from pallas_kernels.gpu import TILED, Named, launch, load_once, store


class Steps(NamedTuple):
    """What a kernel does with the keys that stream past a block of queries.

    Attributes:
      start: makes the first carry.
      step: function of (tile, what stays, k, v, carry, ping-pong) to the next carry.
      end: function of the last carry to blocks of the outs, by name.
      products: of a step.
      pingpong: whether a step changes twice, where there are two warpgroups.
    """

    start: Callable
    step: Callable
    end: Callable
    products: int
    pingpong: bool = False


def over_keys(
    name: str, case: GpuCase, arrays: Named, tables: MaskTables, outs: Named, do: Steps
) -> dict[str, jax.Array]:
    """A kernel in which a block of queries stays, and keys and values stream past it.

    Args:
      arrays: k and v, q, and what else stays as q does.
      outs: the first like q, written where q was; others like `case.rows`.
    """
    stay = tuple(x for x in arrays if x not in ("k", "v"))
    program = _Program(case, tables, stay, outs, do)
    sizes = {"batch": case.batch, "heads": case.heads, "blocks": case.q_blocks}
    grid = grid_of(case, tables, sizes)
    inputs = arrays | tables.per_query | tables.per_key | tables.rest
    return launch(
        name,
        partial(program.run, grid),
        inputs,
        outs,
        grid.launched,
        program.memory(),
        TILED,
        case.launched,
        cost_of(case, do.products, inputs | outs),
    )


class _Program(NamedTuple):
    case: GpuCase
    tables: MaskTables
    stay: tuple[str, ...]  # blocks of queries
    outs: Named
    do: Steps

    @property
    def first_out(self) -> str:
        """The one that is written where q was."""
        return next(iter(self.outs))

    @property
    def once(self) -> tuple[str, ...]:
        """What is copied once for a block of queries."""
        return *self.stay, *self.tables.per_query

    def _here(self) -> Named:
        """Shared memory for what stays, and for what is written."""
        _, *vectors = self.outs
        of_rows = self.tables.per_query | {x: self.outs[x] for x in vectors}
        return scratch_of(self.case, self.stay, of_rows)

    def memory(self) -> Named:
        memory = {f"{x}_here": ref for x, ref in self._here().items()}
        memory["arrived"] = plgpu.Barrier(
            num_arrivals=len(self.once), num_barriers=self.case.warpgroups
        )
        if self.do.pingpong and self.case.warpgroups == 2:
            memory["pingpong"] = plgpu.Barrier(num_arrivals=2)
        return memory

    def run(self, grid: Grid, refs: Named) -> None:
        case, tables, stream = self.case, self.tables, partial(self.stream, refs)
        shapes = shapes_of(case, ("k", "v"), tables.per_key, case.block_kv)
        shapes |= shapes_of_pairs(case, tables)
        with_ring(grid, stream, shapes, case.warpgroups, OF_PAIRS)

    def stream(self, refs: Named, b, n, block) -> Stream:
        """What a block of the queries of a head needs, and what is done with it."""
        case, tables = self.case, self.tables
        # The last block takes longest with a causal mask, so it is started first.
        i = case.q_blocks - 1 - block
        rows, mine = rows_of_warpgroup(case, i)
        here = {x: refs[f"{x}_here"].at[mine] for x in self._here()}
        here[self.first_out] = here["q"]
        loops = _key_spans(case, refs, tables, b, i)

        def part(x):
            of_blocks = x in self.stay or x == self.first_out
            at = (b, rows, n) if of_blocks else (*row_at(refs[x], b, n), rows)
            return refs[x].at[at]

        def read(ring):
            arrived = refs["arrived"].at[mine]
            load_once([(part(x), here[x]) for x in self.once], arrived)
            pingpong = PingPong(refs.get("pingpong"))
            carry = pingpong.run(lambda: self.visit(ring, loops, here, pingpong))
            self.write(here, carry)
            store([(here[x], part(x)) for x in self.outs])

        sources = _key_sources(case, refs, tables, b, n, i)
        return Stream(sources, loops[0].first, loops[-1].stop, read)

    def visit(self, ring: Ring, loops: list[Span], here: Named, pingpong: PingPong):
        """The carry after all keys."""
        case, tables, carry = self.case, self.tables, self.do.start()
        queries = {x: here[x][...] for x in tables.per_query}

        def one(masked, j, got, carry):
            keys = {x: got[x][...] for x in tables.per_key}
            first_key = j * case.block_kv
            tile = LogitsTile(case, queries, keys, first_key, masked, got)
            return self.do.step(tile, here, got["k"], got["v"], carry, pingpong)

        for loop in loops:
            carry = ring.visit(loop, partial(one, loop.masked), carry)
        return carry

    def write(self, here: Named, carry) -> None:
        """What comes of the carry; the first of the outs where q was."""
        for x, value in self.do.end(carry).items():
            here[x][...] = value.astype(self.outs[x].dtype)


def _key_spans(case: GpuCase, refs: Named, tables: MaskTables, b, i) -> list[Span]:
    """What block `i` of the queries visits."""
    masked = masks_all(case, tables)
    if "blocks" not in refs:
        return spans([0, 0, case.keys // case.block_kv, case.kv_blocks], masked)
    first, whole, past, stop = bounds(refs, b, i)
    # Without a window the first key is visible to all.
    return spans([first, whole if case.rules.window else first, past, stop], masked)


def _key_sources(case: GpuCase, refs: Named, tables: MaskTables, b, n, i):
    """What is copied for block j of the keys, for block `i` of head `n`'s queries."""
    kv_head = lax.div(n, np.int32(case.group))
    keys = lambda j: pl.ds(j * case.block_kv, case.block_kv)
    sources: dict[str, Callable] = {
        x: lambda j, ref=refs[x]: ref.at[b, keys(j), kv_head] for x in ("k", "v")
    }
    for x in tables.per_key:
        sources[x] = lambda j, ref=refs[x]: ref.at[(*row_at(ref, b, n), keys(j))]

    if "bias_tile" in tables.rest:
        bias = refs["bias_tile"]
        sources["bias_tile"] = lambda j, mine: bias.at[
            (*row_at(bias, b, n), rows_of(case, i, mine), keys(j))
        ]
    if "mask" in tables.rest:
        mask = refs["mask"]
        for which, x in enumerate(MASK_WORDS):
            sources[x] = lambda j, mine, which=which: mask.at[
                (*row_at(mask, b, n), 2 * j + which, rows_of(case, i, mine))
            ]
    return sources
