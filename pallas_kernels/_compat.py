"""What only `jax.extend` and `jax._src` can do.

An operation that cannot be lowered, and says why; a simulated GPU.
"""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax.core import ShapedArray
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir

_refused = Primitive("refused")
_refused.multiple_results = True


def refused(args: Any, like: Any, message: str) -> Any:
    """Arrays like `like`, made of `args`; raises ValueError when it is lowered."""
    leaves, tree = jax.tree.flatten(like)
    kinds = tuple((x.shape, x.dtype) for x in leaves)
    outs = _refused.bind(*jax.tree.leaves(args), kinds=kinds, message=message)
    return jax.tree.unflatten(tree, outs)


@_refused.def_abstract_eval
def _abstract(*avals, kinds, message):
    return [ShapedArray(shape, dtype) for shape, dtype in kinds]


def _raise(*args, message, **params):
    raise ValueError(message)


_refused.def_impl(_raise)
mlir.register_lowering(_refused, lambda ctx, *args, **params: _raise(**params))


def _batched(args, dims, *, kinds, message):
    sizes = [x.shape[d] for x, d in zip(args, dims, strict=True) if d is not None]
    kinds = tuple(((sizes[0], *shape), dtype) for shape, dtype in kinds)
    return _refused.bind(*args, kinds=kinds, message=message), [0] * len(kinds)


batching.primitive_batchers[_refused] = _batched


_SIMULATED: ContextVar[str | None] = ContextVar("simulated", default=None)


def simulated_platform() -> str | None:
    """The platform of the `simulated` that this runs in."""
    return _SIMULATED.get()


@contextlib.contextmanager
def simulated(platform: str) -> Iterator[None]:
    """Inside, `dispatch` takes the kernels of "tpu" or "cuda", simulated on a CPU.

    Memory that nobody wrote holds NaN, and races are looked for.
    """
    make: Any
    force: Any
    if platform == "tpu":
        from jax.experimental.pallas import tpu as pltpu

        make, force = pltpu.InterpretParams, pltpu.force_tpu_interpret_mode
        reset = pltpu.reset_tpu_interpret_mode_state
    else:  # public from jax 0.11 on
        from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call, params

        make, force = params.InterpretGPUParams, params.force_gpu_interpret_mode
        reset = interpret_pallas_call.reset_gpu_interpret_mode_state
    token = _SIMULATED.set(platform)
    try:
        with force(make(detect_races=True, uninitialized_memory="nan")):
            yield
    finally:
        _SIMULATED.reset(token)
        reset()
