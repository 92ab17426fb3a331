"""The process that compiles for a chip that is not there; run as a file, on its own.

It reads requests as length-prefixed pickles on stdin and answers on the stdout it was
started with; everything else that XLA and its plugins print goes to stderr. Each
request is a serialized `jax.export` artefact with the target's topology; the answer is
plain data. This file imports nothing of jaxmem, so that a worker starts as fast as jax.
"""

import glob
import importlib
import math
import os
import pickle
import queue
import re
import shutil
import struct
import sys
import threading
import time
from typing import Any, BinaryIO

IDLE_SECONDS = 300.0
_HEADER = struct.Struct("<Q")
_MEMORY = ("argument", "output", "alias", "temp", "generated_code")
_DUMPS = {
    "buffer_assignment": "*buffer-assignment.txt",
    "buffer_assignment_values": "*buffer-assignment-values.txt",
    "live_range": "*live-range.txt",
    "memory_usage_report": "*memory-usage-report.txt",
    "hlo": "*after_optimizations.txt",
}


def write_frame(stream: BinaryIO, value: Any) -> None:
    """One length-prefixed pickle."""
    payload = pickle.dumps(value, protocol=5)
    stream.write(_HEADER.pack(len(payload)))
    stream.write(payload)
    stream.flush()


def read_frame(stream: BinaryIO) -> Any:
    """The next value written by `write_frame`; EOFError at the end."""
    header = _read_exactly(stream, _HEADER.size)
    return pickle.loads(_read_exactly(stream, _HEADER.unpack(header)[0]))


def _read_exactly(stream: BinaryIO, size: int) -> bytes:
    chunks, left = [], size
    while left:
        chunk = stream.read(left)
        if not chunk:
            raise EOFError("the other side closed the pipe")
        chunks.append(chunk)
        left -= len(chunk)
    return b"".join(chunks)


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


def compile_request(request: dict[str, Any], dump_dir: str) -> dict[str, Any]:
    """Compiles one artefact; the numbers, the aliases and the dumped text."""
    import jax
    from jax import export

    jax.config.update("jax_enable_x64", request["x64"])
    if b"mosaic_gpu" in request["exported"]:
        # tells the compiler where the kernels' runtime library is
        importlib.import_module("jax.experimental.pallas.mosaic_gpu")
    exported = export.deserialize(bytearray(request["exported"]))
    devices = devices_for(request["target"])[: exported.nr_devices]
    started = time.perf_counter()
    function, specs, donate = _call_of(exported, request, devices)
    # without arguments nothing else says which device the program is for
    place = jax.sharding.SingleDeviceSharding(devices[0])
    where: dict[str, Any] = {} if specs else {"out_shardings": place}
    lowered = jax.jit(function, donate_argnums=donate, **where).lower(*specs)
    compiled = lowered.compile(compiler_options=request["compiler_options"])
    dump = _read_dump(dump_dir)
    dump["hlo"] = dump["hlo"] or compiled.as_text() or ""
    return {
        "memory": _memory(compiled),
        "cost": _cost(compiled),
        "aliases": _aliases(dump["hlo"], exported.module_kept_var_idx),
        "argument_sizes": [_device_bytes(spec) for spec in specs],
        "dump": dump,
        "compile_seconds": time.perf_counter() - started,
    }


def _call_of(exported: Any, request: dict[str, Any], devices: list[Any]):
    """A function of the used arguments alone, as jit passes no others to the chip."""
    import jax
    import jax.numpy as jnp

    kept = exported.module_kept_var_idx
    position = {index: i for i, index in enumerate(kept)}
    avals = exported.in_avals

    def step(*leaves):
        full = [
            leaves[position[i]] if i in position else jnp.zeros(aval.shape, aval.dtype)
            for i, aval in enumerate(avals)
        ]
        return exported.call(*full)

    step.__name__ = step.__qualname__ = request["name"]
    shardings = _shardings(request["shardings"], devices, exported.nr_devices)
    specs = [
        jax.ShapeDtypeStruct(avals[i].shape, avals[i].dtype, sharding=shardings[i])
        for i in kept
    ]
    return step, specs, tuple(position[i] for i in request["donate"] if i in position)


def _device_bytes(spec: Any) -> int:
    """Bytes of an argument on one device."""
    sharding = spec.sharding
    shape = sharding.shard_shape(spec.shape) if sharding is not None else spec.shape
    return math.prod(shape) * spec.dtype.itemsize


def _shardings(described: list[Any], devices: list[Any], count: int) -> list[Any]:
    """The shardings of `_compile.describe_sharding`, over this target's devices."""
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
    """Bytes on one device. Peak by one definition everywhere: XLA's own differs."""
    analysis = compiled.memory_analysis()
    if analysis is None:
        raise RuntimeError("the compiler gave no memory analysis for this target")
    sizes = {k: int(getattr(analysis, f"{k}_size_in_bytes")) for k in _MEMORY}
    live = sizes["argument"] + sizes["output"] + sizes["temp"] - sizes["alias"]
    return sizes | {"peak": live}


def _cost(compiled: Any) -> dict[str, float]:
    """Flops and bytes accessed, where the target's compiler counts them."""
    try:
        cost = compiled.cost_analysis()
    except Exception:  # plugins differ in what they raise for "not implemented"
        return {}
    keep = ("flops", "bytes accessed", "transcendentals", "optimal_seconds")
    return {k: float(cost[k]) for k in keep if cost and k in cost}


def _aliases(hlo: str, kept: tuple[int, ...]) -> list[tuple[str, int]]:
    """(output index, flat argument) of each input buffer that an output reuses."""
    start = hlo.find("input_output_alias={")
    if start < 0:
        return []
    line = hlo[start : hlo.find("\n", start)]
    pairs = re.findall(r"\{([\d, ]*)\}: \((\d+), \{[\d, ]*\}", line)
    return [(out, kept[int(number)]) for out, number in pairs]


def _read_dump(dump_dir: str) -> dict[str, str]:
    """The largest file of each kind: small helper modules are compiled beside."""
    return {kind: _largest(dump_dir, pattern) for kind, pattern in _DUMPS.items()}


def _largest(dump_dir: str, pattern: str) -> str:
    paths = glob.glob(os.path.join(glob.escape(dump_dir), pattern))
    if not paths:
        return ""
    with open(max(paths, key=os.path.getsize), errors="replace") as file:
        return file.read()


def _clear(dump_dir: str) -> None:
    shutil.rmtree(dump_dir, ignore_errors=True)
    os.makedirs(dump_dir, exist_ok=True)


def answer(request: dict[str, Any], dump_dir: str) -> dict[str, Any]:
    """The result of a request, or the error as text: classes may not unpickle."""
    _clear(dump_dir)
    try:
        return {"result": compile_request(request, dump_dir)}
    except Exception as error:
        return {"error": str(error), "type": type(error).__name__}


def main(dump_dir: str) -> None:
    """Serves requests until stdin closes or nothing was asked for long."""
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    requests: queue.Queue = queue.Queue()

    def listen():
        while True:
            try:
                requests.put(read_frame(sys.stdin.buffer))
            except EOFError:  # the caller has gone: also amid a long compile
                os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        try:
            request = requests.get(timeout=IDLE_SECONDS)
        except queue.Empty:
            os._exit(0)
        write_frame(out, answer(request, dump_dir))


if __name__ == "__main__":
    main(sys.argv[1])
