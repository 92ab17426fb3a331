"""What to write, for each cause."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from jaxmem._bytes import format_bytes
from jaxmem.explaining._diagnosis import DEFAULT_SHARE, Diagnosis, excess
from jaxmem.explaining._facts import Facts
from jaxmem.memory.buffers import arrays_of

_RUN = "python train.py"
_ROOM = 0.95  # of a GPU's limit: the rest is for what does not come in one piece
_ON_DEVICE = 'limit = jax.local_devices()[0].memory_stats()["bytes_limit"]'
_DONATED = 0.1  # of what is needed, from which donation is worth a line


@dataclass(frozen=True)
class LineToWrite:
    """One thing to do.

    Attributes:
      why: what it does.
      line: Python, or a line of a shell.
    """

    why: str
    line: str


def advise_on(diagnosis: Diagnosis, facts: Facts) -> tuple[LineToWrite, ...]:
    """What to write for a cause, what helps most first."""
    return tuple(_ADVICE[diagnosis](facts))


def budget_of(facts: Facts) -> str:
    """A step's budget, as text: what there is, less other arrays; "" if unknown."""
    limit = facts.limit or facts.device_total or facts.chip_bytes
    if limit is None:
        return ""
    other = 0
    if facts.arguments is not None and facts.stage == "run":
        other = max((facts.in_use or 0) - facts.arguments, 0)
    room = limit - other if limit > other else limit
    if facts.of_chip and facts.device == "GPU":
        room = int(DEFAULT_SHARE * room)
    return _written(int(_ROOM * room) if facts.device == "GPU" else room)


def _written(size: int) -> str:
    """Rounded down, as text that `budget` takes."""
    if size < 2**30:
        return f"{size >> 20}MiB"
    return f"{int(10 * size / 2**30) / 10:g}GiB"


def _fit(facts: Facts) -> Iterator[LineToWrite]:
    known = budget_of(facts)
    budget, first = (f'"{known}"', "") if known else ("limit", f"{_ON_DEVICE}\n")
    yield LineToWrite(
        "Recompute, and run in parts, until the step fits:",
        f"{first}step = jaxmem.schedule(step, budget={budget})",
    )
    yield LineToWrite(
        "See which other techniques make it fit, and what each costs:",
        f"print(jaxmem.advise(step, *args, budget={budget}))",
    )


def _donate(facts: Facts) -> Iterator[LineToWrite]:
    if facts.undonated > _DONATED * (facts.needed or facts.requested or 0):
        yield LineToWrite(
            f"Donate the state: up to {format_bytes(facts.undonated)} of outputs lie "
            "beside arguments of that size:",
            "step = jax.jit(step, donate_argnums=0)",
        )


def _larger_pool(facts: Facts) -> Iterator[LineToWrite]:
    """Where the rest of the GPU would be enough, if the limit is JAX's default."""
    if facts.device != "GPU" or facts.limit is None or facts.in_use is None:
        return
    whole = facts.in_use + (facts.requested or 0)
    if facts.limit < whole <= _ROOM * facts.limit / DEFAULT_SHARE:
        yield LineToWrite(
            f"If {format_bytes(facts.limit)} is JAX's default of 75 % of the GPU, take "
            "more of it:",
            f"XLA_CLIENT_MEM_FRACTION=.95 {_RUN}",
        )


def _peak(facts: Facts) -> Iterator[LineToWrite]:
    yield from _donate(facts)
    yield from _fit(facts)
    yield from _larger_pool(facts)


def _padding(facts: Facts) -> Iterator[LineToWrite]:
    worst = max(facts.largest, key=lambda b: b.padding_bytes, default=None)
    name, axis = "x", 0
    shapes = arrays_of(worst.array) if worst is not None else ()
    if worst is not None and worst.padding_bytes and shapes and shapes[0].sizes:
        axis = shapes[0].sizes.index(max(shapes[0].sizes))
        name = worst.array
    yield LineToWrite(
        f"Give {name} its longest axis last, or merge short axes:",
        f"x = jnp.moveaxis(x, {axis}, -1)",
    )
    yield from _peak(facts)


def _constants(facts: Facts) -> Iterator[LineToWrite]:
    yield LineToWrite(
        "Give the array to the step as an argument:",
        "step = jax.jit(lambda state, batch, table: ...)",
    )
    yield LineToWrite(
        "Find where it is captured:",
        f"JAX_CAPTURED_CONSTANTS_REPORT_FRAMES=-1 {_RUN}",
    )
    if excess(facts) > (facts.constants or 0):
        yield from _fit(facts)


def _fragmentation(facts: Facts) -> Iterator[LineToWrite]:
    if facts.device == "GPU":
        yield LineToWrite(
            "Use CUDA's allocator, which reduces fragmentation:",
            f"XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async {_RUN}",
        )
        yield LineToWrite(
            "Keep JAX's reservation, if it was turned off, and run the largest step "
            "first:",
            f"XLA_PYTHON_CLIENT_PREALLOCATE=true {_RUN}",
        )
    else:
        yield LineToWrite(
            "Free what is not needed, programs included, before the largest step:",
            "del old_state; jax.clear_caches()",
        )
    yield from _fit(facts)


def _live(facts: Facts) -> Iterator[LineToWrite]:
    yield LineToWrite(
        "See what is alive, the largest first, and what is not of the state:",
        "print(jaxmem.live_arrays(state=state))",
    )
    yield from _donate(facts)
    if facts.shared is None:
        yield LineToWrite(
            "Donate the state, so that the old one is not kept beside the new one:",
            "step = jax.jit(step, donate_argnums=0)",
        )
    if facts.stage == "load":
        yield LineToWrite("Free programs that are done with:", "jax.clear_caches()")
    yield from _fit(facts)
    yield from _larger_pool(facts)


def _others(facts: Facts) -> Iterator[LineToWrite]:
    yield LineToWrite(
        "Find the processes that use it, and stop leftover ones:", "nvidia-smi"
    )
    yield LineToWrite(
        "Or share the GPU: take memory as it is needed,",
        f"XLA_PYTHON_CLIENT_PREALLOCATE=false {_RUN}",
    )
    share = 0.4
    if facts.device_free and facts.device_total:
        own = facts.device_free + (facts.in_use or 0)
        share = max(int(95 * own / facts.device_total), 1) / 100
    yield LineToWrite(
        "or give each process a part of it:",
        f"XLA_CLIENT_MEM_FRACTION={f'{share:.2f}'.lstrip('0')} {_RUN}",
    )


def _pool(facts: Facts) -> Iterator[LineToWrite]:
    yield LineToWrite(
        "Let JAX use more of the GPU than its default of 75 %:",
        f"XLA_CLIENT_MEM_FRACTION=.95 {_RUN}",
    )
    yield from _fit(facts)


def _library(facts: Facts) -> Iterator[LineToWrite]:
    del facts
    yield LineToWrite(
        "Leave more of the GPU to libraries:",
        f"XLA_CLIENT_MEM_FRACTION=.65 {_RUN}",
    )
    yield LineToWrite(
        "or take memory only as it is needed:",
        f"XLA_PYTHON_CLIENT_PREALLOCATE=false {_RUN}",
    )


def _autotuning(facts: Facts) -> Iterator[LineToWrite]:
    yield LineToWrite(
        "Compile before the arrays exist, with shapes in their place:",
        "compiled = jax.jit(step).lower(*jax.eval_shape(make_args)).compile()",
    )
    if facts.autotuning == "convolution":
        yield LineToWrite(
            "or go on where a trial has failed:",
            f"XLA_FLAGS=--xla_gpu_strict_conv_algorithm_picker=false {_RUN}",
        )
    yield LineToWrite(
        "or do without trials, with slower kernels:",
        f"XLA_FLAGS=--xla_gpu_autotune_level=0 {_RUN}",
    )
    yield from _fit(facts)


def _kernel(facts: Facts) -> Iterator[LineToWrite]:
    yield LineToWrite(
        "Make the kernel's blocks smaller:", "pl.BlockSpec((block // 2, ...), ...)"
    )
    if facts.needed is not None:
        kib = -(-facts.needed // 2**20) * 1024
        yield LineToWrite(
            "or allow it more, where the chip has so much:",
            f"LIBTPU_INIT_ARGS=--xla_tpu_scoped_vmem_limit_kib={kib} {_RUN}",
        )


def _host(facts: Facts) -> Iterator[LineToWrite]:
    if facts.pinned:
        least = 2 * -(-(facts.requested or 0) // 2**30)
        yield LineToWrite(
            "Allow more of it than the default of 64 GiB:",
            f"XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB={max(128, least)} {_RUN}",
        )
        return
    yield LineToWrite(
        "Initialize parameters on their devices, not on the host first:",
        "state = jax.jit(init, out_shardings=shardings)(key)",
    )
    yield LineToWrite(
        "Read data as it is needed:", 'data = np.load("data.npy", mmap_mode="r")'
    )
    yield LineToWrite(
        "Estimate with shapes: nothing is allocated,",
        'print(jaxmem.estimate(step, *jax.eval_shape(make_args), target="h100"))',
    )


def _unknown(facts: Facts) -> Iterator[LineToWrite]:
    chip = facts.chip or ("tpu-v5e" if facts.device == "TPU" else "h100")
    yield LineToWrite(
        "Compare with what the step takes, by module and line:",
        f'print(jaxmem.explain(error, step, *args, target="{chip}"))',
    )
    yield from _live(facts)


_ADVICE: dict[Diagnosis, Callable[[Facts], Iterator[LineToWrite]]] = {
    "true peak": _peak,
    "padding": _padding,
    "constants": _constants,
    "fragmentation": _fragmentation,
    "live arrays": _live,
    "another process": _others,
    "pool limit": _pool,
    "no room for libraries": _library,
    "autotuning": _autotuning,
    "kernel memory": _kernel,
    "host memory": _host,
    "unknown": _unknown,
}
