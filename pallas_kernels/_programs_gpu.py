"""What programs on Hopper are made of: launches, copies, streams of tiles.

A program is one warpgroup: 128 threads.

What makes each asynchronous operation's result visible: a copy in, the barrier that is
waited for; a product, the wait at the end of `run_scoped`'s read or of `run_state`; a
copy out, `commit_smem` before it and `wait_smem_to_gmem` after it; a copy in over what
was read, `commit_smem` after the reads, and the barrier that Mosaic puts before a copy.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels._compat import varying_as

STAGES = 2  # tiles of a stream on their way or in use
Named = dict[str, Any]


def launch(name: str, body: Callable, inputs: Named, outs: Named, scratch: Named, grid):
    """`body` of a dict of all refs, for each point of the grid; a dict of the outs."""

    def kernel(*refs):
        body(dict(zip((*inputs, *outs, *scratch), refs, strict=True)))

    run = plgpu.kernel(
        kernel,
        out_type=list(outs.values()),
        scratch_types=list(scratch.values()),
        grid=tuple(grid.values()),
        grid_names=tuple(grid),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Warpgroup
        ),
    )
    with jax.enable_x64(False):  # where it is on, emit_pipeline mixes its integers
        got = run(*inputs.values())
    return {x: varying_as(value, outs[x]) for x, value in zip(outs, got, strict=True)}


def load_once(copies: list, barrier) -> None:
    """Starts all copies (source, target), and waits until each is there."""
    for source, target in copies:
        plgpu.copy_gmem_to_smem(source, target, barrier)
    plgpu.barrier_wait(barrier)


def store(copies: list) -> None:
    """Copies what was just written to, (source, target), and waits until it is out."""
    plgpu.commit_smem()
    for source, target in copies:
        plgpu.copy_smem_to_gmem(source, target)
    plgpu.wait_smem_to_gmem(0)


def stream(refs: Named, specs: Named, steps: tuple, step: Callable, start):
    """The last `carry = step(indices, tiles by name, carry)` over blocks of refs."""

    def body(indices, *rest):
        *tiles, carry = rest
        carry = step(indices, dict(zip(specs, tiles, strict=True)), carry)
        plgpu.commit_smem()  # all is read before the next copies overwrite it
        return carry

    run = plgpu.emit_pipeline(
        body,
        grid=steps,
        in_specs=list(specs.values()),
        max_concurrent_steps=STAGES,
        init_carry=start,
    )
    return run(*(refs[name] for name in specs))


def spread(vector, shape: tuple[int, int], axis: int):
    """A matrix that has `vector` along `axis` and is constant along the other."""
    return lax.broadcast_in_dim(vector, shape, [axis])


def padded(x, block: int, fill: float = 0.0):
    """`x` with `fill` behind its last axis, to a multiple of `block`."""
    missing = -x.shape[-1] % block
    if not missing:
        return x
    behind = [(0, 0)] * (x.ndim - 1) + [(0, missing)]
    return jnp.pad(x, behind, constant_values=jnp.asarray(fill, x.dtype))
