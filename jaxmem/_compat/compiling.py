"""A module compiled for absent devices.

This file imports nothing of jaxmem: the process that compiles loads it by its place.
"""

from typing import Any


def compile_module(module: str, devices: list, options: dict[str, Any]) -> Any:
    """The executable of a StableHLO module, for absent devices.

    `jax.jit` asks the devices for their memories, which those of a topology do not have
    on every platform: the module itself names the memory of each argument.
    """
    import numpy as np
    from jax._src import compiler
    from jax._src.interpreters import mlir
    from jax._src.lib import xla_client
    from jaxlib.mlir import ir

    places = np.array([[device.id for device in devices]])
    how = compiler.get_compile_options(
        num_replicas=1,
        num_partitions=len(devices),
        device_assignment=places,
        env_options_overrides=options,
    )
    listed = xla_client.DeviceList(tuple(devices))
    client = devices[0].client
    build = client.compile_and_load if client.platform == "cpu" else client.compile
    with mlir.make_ir_context():
        parsed = ir.Module.parse(module)
        return build(parsed, executable_devices=listed, compile_options=how)
