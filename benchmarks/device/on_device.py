"""A training step on this device: compiled, run with its state carried, its peak."""

import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np

import jaxmem
from benchmarks._common import MIB
from benchmarks.device import machine
from benchmarks.steps.kernels import filled

WORDS = 97  # tokens are less: the smallest vocabulary in use


@dataclass
class Step:
    """A step, its arguments on the device, and how many of these it gives back.

    Attributes:
      compiled: the program.
      args: the arguments of the next call.
      carried: the first so many are results of the last call, and donated.
    """

    compiled: Any
    args: tuple
    carried: int
    _out: Any = field(default=None)

    def __call__(self) -> float:
        """Milliseconds of one call."""
        begin = time.perf_counter()
        out = jax.block_until_ready(self.compiled(*self.args))
        took = 1e3 * (time.perf_counter() - begin)
        if self.carried:
            self.args = *out[: self.carried], *self.args[self.carried :]
        return took


def ready(
    step: Callable, args: tuple, carried: int, others: Mapping[str, Step] | None = None
) -> Step:
    """Compiled for this device, with arguments at random.

    Where nothing is carried, those of another such step, if they are alike.
    """
    program = compiled(step, args)
    for other in (others or {}).values():
        if not carried and _kinds(other.args) == _kinds(args):
            return Step(program, other.args, 0)
    return Step(program, possible(filled(args, WORDS)), carried)


def _kinds(args: Any) -> Any:
    leaves, tree = jax.tree.flatten(args)
    return tree, [(x.shape, x.dtype) for x in leaves]


def that_fit(sides: Mapping[str, Step]) -> tuple[dict[str, Step], dict[str, str]]:
    """Those that run once, and of the others what the device said of its memory."""
    fit, refused = {}, {}
    for name, step in sides.items():
        try:
            step()
            fit[name] = step
        except jax.errors.JaxRuntimeError as error:
            if not out_of_memory(error):
                raise
            refused[name] = str(error)[:200]
    return fit, refused


def out_of_memory(error: Exception) -> bool:
    return "RESOURCE_EXHAUSTED" in str(error)


def compiled(step: Callable, args: tuple) -> Any:
    lower = getattr(step, "lower", None) or jax.jit(step).lower
    return lower(*args).compile()


def possible(args: Any) -> Any:
    """Second moments are not negative, and counters are small."""

    def mend(path, x):
        names = [getattr(key, "name", getattr(key, "key", "")) for key in path]
        return abs(x) if "nu" in names else x * 0 if _counts(names) else x

    return jax.tree_util.tree_map_with_path(mend, args)


def _counts(names: list) -> bool:
    return not {"count", "micro_step", "mini_step", "gradient_step"}.isdisjoint(names)


def compiled_bytes(program: Any) -> int:
    """Peak by the compiler of this process: arguments, outputs, temporaries."""
    of = program.memory_analysis()
    whole = of.argument_size_in_bytes + of.output_size_in_bytes
    return int(whole + of.temp_size_in_bytes - of.alias_size_in_bytes)


def estimated(step: Callable, args: tuple) -> dict[str, Any]:
    """What `jaxmem.estimate` says without a device, or why it says nothing."""
    try:
        report = jaxmem.estimate(step, *args, target=machine.target())
    except (ValueError, RuntimeError, TimeoutError) as error:
        return {"estimate": str(error).replace(sys.executable, "python")[:200]}
    return {"estimated MiB": report.peak_bytes / MIB}


def stats() -> dict[str, int]:
    """Bytes in use and their peak; empty where the device does not tell."""
    return jax.local_devices()[0].memory_stats() or {}


def held_bytes(args: Any) -> int:
    return sum(np.prod(x.shape, dtype=int) * x.dtype.itemsize for x in _arrays(args))


def _arrays(args: Any) -> list:
    plain = lambda x: not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [x for x in jax.tree.leaves(args) if plain(x)]
