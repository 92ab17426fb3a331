"""One compile, in a process of its own: from a request in a folder to an answer there.

This file imports nothing of jaxmem, which would cost the worker time to start.
"""

import importlib
import importlib.util
import os
import pickle
from typing import Any

_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_HOST = tuple(f"host_{kind}" for kind in _MEMORY[:4])
_COST = ("flops", "bytes accessed", "transcendentals", "optimal_seconds")


def compile_into(folder: str) -> None:
    """Compiles `folder/request`, and writes `folder/answer`: a result or an error."""
    with open(os.path.join(folder, "request"), "rb") as file:
        request = pickle.load(file)
    os.environ.update(request["environment"])
    try:
        answer = {"result": compile_request(request, os.path.join(folder, "dump"))}
    except Exception as error:  # sent as text: its class may not unpickle
        answer = {"error": str(error), "type": type(error).__name__}
    unfinished = os.path.join(folder, "answer.part")
    with open(unfinished, "wb") as file:
        pickle.dump(answer, file, protocol=5)
    os.replace(unfinished, os.path.join(folder, "answer"))


def compile_request(request: dict[str, Any], dump_dir: str) -> dict[str, Any]:
    """The numbers of the compiled module; its text where XLA does not dump it."""
    import jax
    from jax import export

    jax.config.update("jax_enable_x64", request["x64"])
    if b"mosaic_gpu" in request["exported"]:
        # tells the compiler where the kernels' runtime library is
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    exported = export.deserialize(bytearray(request["exported"]))
    devices = devices_for(request["target"])[: exported.nr_devices]
    # options and not XLA_FLAGS, with which libtpu would dump at the end alone
    dump = {"xla_dump_to": dump_dir, "xla_dump_hlo_as_text": True}
    options = (request["compiler_options"] or {}) | dump
    if any(map(_is_on_host, (*exported.in_avals, *exported.out_avals))):
        compiled = _private_jax().compile_module(
            exported.mlir_module(), devices, options
        )
    else:
        compiled = _lowered(exported, request, devices).compile(
            compiler_options=options
        )
    dumped = os.path.isdir(dump_dir) and bool(os.listdir(dump_dir))
    return {
        "memory": _memory(compiled),
        "cost": _cost(compiled),
        "hlo": "" if dumped else compiled.as_text() or "",
    }


def _is_on_host(aval: Any) -> bool:
    import jax

    return getattr(aval, "memory_space", None) == jax.memory.Space.Host


def _private_jax() -> Any:
    """The file of private JAX, by its place: the worker does not import jaxmem."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = os.path.join(here, "..", "..", "_compat", "compiling.py")
    spec = importlib.util.spec_from_file_location("jaxmem_compiling", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _lowered(exported: Any, request: dict[str, Any], devices: list[Any]) -> Any:
    import jax

    function, specs, donate = _call_of(exported, request, devices)
    # a step without arguments has nothing else that names its device
    place = jax.sharding.SingleDeviceSharding(devices[0])
    where: dict[str, Any] = {} if specs else {"out_shardings": place}
    return jax.jit(function, donate_argnums=donate, **where).lower(*specs)


def devices_for(target: dict[str, Any]) -> list[Any]:
    """The devices of the target: of a topology, or this process's own for cpu."""
    import jax
    from jax.experimental import topologies

    if target["platform"] == "cpu":
        return jax.devices("cpu")
    if target["platform"] == "tpu":
        options = {"topology_name": target["topology"], **target["options"]}
        return topologies.get_topology_desc(platform="tpu", **options).devices
    options = {"target_config": target["config"], "topology": target["topology"]}
    return topologies.get_topology_desc(target["name"], "cuda", **options).devices


def _call_of(exported: Any, request: dict[str, Any], devices: list[Any]):
    """A function of the used arguments alone: jit passes no others to the chip."""
    import jax
    import jax.numpy as jnp

    used = exported.module_kept_var_idx
    position = {index: i for i, index in enumerate(used)}
    avals = exported.in_avals

    def step(*leaves):
        full = [
            leaves[position[i]] if i in position else jnp.zeros(aval.shape, aval.dtype)
            for i, aval in enumerate(avals)
        ]
        return exported.call(*full)

    shardings = _shardings(request["shardings"], devices, exported.nr_devices)
    specs = [
        jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype, sharding=shardings[i])
        for i in used
    ]
    return step, specs, tuple(position[i] for i in request["donate"] if i in position)


def _shardings(described: list[Any], devices: list[Any], count: int) -> list[Any]:
    """The shardings of `describe_sharding`, over the devices of this target."""
    import jax
    import numpy as np
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    if count == 1:
        return [jax.sharding.SingleDeviceSharding(devices[0])] * len(described)
    if len(devices) < count:
        raise ValueError(f"the step needs {count} devices, the target has fewer")

    def make(item):
        if item is None:
            return None
        shape, names, spec, memory_kind = item
        mesh = Mesh(np.array(devices).reshape(shape), names)
        return NamedSharding(mesh, PartitionSpec(*spec), memory_kind=memory_kind)

    return [make(item) for item in described]


def _memory(compiled: Any) -> dict[str, int]:
    """Bytes on one device."""
    ask = getattr(compiled, "memory_analysis", None)
    analysis = compiled.get_compiled_memory_stats() if ask is None else ask()
    if analysis is None:
        raise RuntimeError("the compiler gave no memory analysis for this target")
    sizes = {k: int(getattr(analysis, f"{k}_size_in_bytes")) for k in _MEMORY}
    # plugins do not all tell them
    host = {k: int(getattr(analysis, f"{k}_size_in_bytes", 0)) for k in _HOST}
    return sizes | host


def _cost(compiled: Any) -> dict[str, float]:
    """Flops and bytes accessed, where the target's compiler counts them."""
    try:
        cost = compiled.cost_analysis()
    except Exception:  # plugins differ in what they raise for "not implemented"
        return {}
    return {k: float(cost[k]) for k in _COST if cost and k in cost}
