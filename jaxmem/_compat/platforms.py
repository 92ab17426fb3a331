"""What is computed for: the devices of a process, of a trace, and of a lowering."""

import contextlib
import math
from typing import Any

import jax

# None: for the device of the process
_TPU = jax.make_user_context(None)


def traced_for_tpu(whether: bool) -> contextlib.AbstractContextManager:
    """A context in which what is traced is for a TPU, or is not; JAX's caches know it.

    It changes nothing where that is so already: what was traced outside stays cached.
    """
    return contextlib.nullcontext() if whether == is_for_tpu() else _TPU(whether)


def is_for_tpu() -> bool:
    """Whether what is traced now is for a TPU; where nobody said so, by the process."""
    return jax.default_backend() == "tpu" if _TPU.value is None else _TPU.value


def is_on_one_device(ctx) -> bool:
    """Whether a primitive is lowered for one device, or for one device's shard."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    if mesh is not None:  # in a `shard_map`, perhaps over some of the axes alone
        left = [n for name, n in mesh.shape.items() if name not in axes.manual_axes]
        return math.prod(left) == 1
    return getattr(axes, "num_devices", 1) == 1


def is_for_export(ctx) -> bool:
    """Whether `jax.export` lowers a primitive, for whichever version loads it."""
    return ctx.module_context.lowering_parameters.for_export


def runs_here(device: Any) -> bool:
    """Whether a device is one of this process, and not of a topology or a mesh."""
    return any(device is own for own in jax.local_devices())


def cudnn_version() -> int | None:
    """The cuDNN of this process, as 91002; None without one."""
    from jax._src.lib import cuda_versions

    return None if cuda_versions is None else cuda_versions.cudnn_get_version()
