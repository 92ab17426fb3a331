"""What kernels for NVIDIA GPUs share: launches and copies.

A program is one warpgroup of 128 threads; in attention of long sequences, three.

Asynchronous operations become visible as follows. A copy into shared memory: by waiting
for its barrier. A matrix product: by the wait at the end of the read in `run_scoped`,
or of `run_state`. A copy out of shared memory: by `commit_smem` before it and
`wait_smem_to_gmem` after it. A copy into memory that was read before: by `commit_smem`
after the reads, and by the barrier that Mosaic puts before a copy.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.xla_metadata import set_xla_metadata

from pallas_kernels._compat import aliased_kernel, simulated_platform, varying_as
from pallas_kernels.arrays import like

THREADS = 128  # of a warpgroup
Named = dict[str, Any]
# With warpgroup semantics Mosaic infers layouts and emits `wgmma`.
TILED = plgpu.CompilerParams(
    approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
)


def launch(
    name: str,
    body: Callable[[Named], None],
    inputs: Named,
    outs: Named,
    grid: dict[str, int],
    scratch: Named | None = None,
    params: Any = None,
    warpgroups: int = 1,
    cost: pl.CostEstimate | None = None,
) -> Named:
    """Runs `body(references by name)` at each point of the grid; returns the outs.

    Args:
      name: of the kernel, in profiles.
      inputs: arrays.
      outs: types of the outputs, as `arrays.like` makes them.
      grid: sizes by the names that `lax.axis_index` takes.
      scratch: types of shared memory and barriers.
      params: `plgpu.CompilerParams`.
      warpgroups: of a program, along the axis "warpgroup" if there is more than one.
      cost: that the compiled module tells of the kernel, for `jaxmem.estimate`.
    """
    scratch = scratch or {}
    threads: Named = {"num_threads": warpgroups, "thread_name": "warpgroup"}

    def kernel(*refs):
        body(dict(zip((*inputs, *outs, *scratch), refs, strict=True)))

    run = plgpu.kernel(
        kernel,
        out_type=list(outs.values()),
        scratch_types=list(scratch.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=params,
        **(threads if warpgroups > 1 else {}),
    )
    told = dataclasses.asdict(cost) if cost else {}
    # Where x64 is on, integers without a dtype are int64.
    with jax.enable_x64(False), set_xla_metadata(**told):
        results = run(*inputs.values())
    return {x: varying_as(y, outs[x]) for x, y in zip(outs, results, strict=True)}


def update_in_place(
    name: str,
    body: Callable[[Named], None],
    inputs: Named,
    written: Iterable[str],
    grid: dict[str, int],
    outs: Named | None = None,
    params: Any = None,
) -> Named:
    """Runs `body(references by name)` at each point of the grid, as `launch`.

    The body writes over the inputs named in `written`: no second array of their size
    exists, which `launch` would make for its outputs.

    Returns:
      The new values of `written`, and the outs.
    """
    written, new = tuple(written), outs or {}
    outs = new | {k: like(inputs[k], inputs[k].shape, inputs[k].dtype) for k in written}

    def kernel(*refs):
        # An aliased output is in the place of its input.
        made = refs[len(inputs) : len(inputs) + len(new)]
        body(dict(zip((*inputs, *new), (*refs[: len(inputs)], *made), strict=True)))

    order = list(inputs)
    run = aliased_kernel(
        kernel,
        out_type=list(outs.values()),
        mesh=plgpu.Mesh(grid=tuple(grid.values()), grid_names=tuple(grid)),
        aliases={order.index(k): list(outs).index(k) for k in written},
        compiler_params=params,
        name=name,
    )
    return dict(zip(outs, run(*inputs.values()), strict=True))


def in_turn(count: int, which, turn, work: Callable[[], None]) -> None:
    """Runs `work` after the programs that have the same `which` and a smaller `turn`.

    Args:
      count: is larger than any `which`.
      which, turn: int32; the `turn`s of a `which` are 0, 1, 2, ... in the programs'
        order, in which the chip starts them. So none waits for one that cannot start.
      work: what it writes to memory is visible to the programs after it.
    """
    if simulated_platform():  # it runs programs in their order: `can_take_turns`
        return work()
    done = pl.get_global(plgpu.SemaphoreType.REGULAR((count,))).at[which]
    plgpu.semaphore_wait(done, turn, decrement=False, memory_scope="gpu")
    work()
    plgpu.semaphore_signal(done, memory_scope="gpu")


def load_once(copies: list, barrier) -> None:
    """Starts all copies (source, target), and waits until each has arrived."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def store(copies: list) -> None:
    """Copies what was just written (source, target), and waits for the copies."""
    plgpu.commit_smem()
    for source, target in copies:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def spread(vector, shape: tuple[int, int], axis: int):
    """A matrix that has `vector` along `axis` and is constant along the other."""
    return lax.broadcast_in_dim(vector, shape, [axis])
