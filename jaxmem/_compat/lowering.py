"""What a primitive is lowered for."""

import math


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
