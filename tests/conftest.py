"""Eight host devices and strict promotion, set before the first array exists.

The tests compile thousands of small programs and run each for a moment: what XLA would
spend on making them fast, more than half of the suite's time, is left out.
"""

import collections
import ctypes
import gc
import os
import pathlib
import re
import sys

_FLAGS = (
    "--xla_force_host_platform_device_count=8",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_backend_optimization_level=0",
    # One piece of code instead of up to 32 that are compiled side by side.
    "--xla_cpu_parallel_codegen_split_count=1",
    # Elementwise loops by the emitter that jax 0.10 has beside the one through MLIR,
    # which takes three times as long to compile. Newer XLA has that one alone, and
    # takes no notice: the suite on the newest jax runs what it emits.
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters",
)
os.environ.setdefault("JAX_PLATFORMS", "cpu")
if os.environ["JAX_PLATFORMS"] == "cpu":  # a device's code is compiled as users have it
    os.environ["XLA_FLAGS"] = " ".join([os.environ.get("XLA_FLAGS", ""), *_FLAGS])

import jax  # noqa: E402
import jaxtyping  # noqa: E402
import pytest  # noqa: E402

jax.config.update("jax_numpy_dtype_promotion", "strict")
jax.config.update("jax_numpy_rank_promotion", "raise")


# Bytes of a process: a fifth of the machine's. Two of them run, a file may add to them
# meanwhile, and what they start needs memory, too.
MOST_RESIDENT = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 5


def _resident() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.fixture(scope="module", autouse=True)
def bounded_memory():
    """Compiled programs are forgotten where a process holds too much after a file.

    They lie between what compiles have freed, so that the C library can give that back
    to the system only once they are gone.
    """
    yield
    if sys.platform == "linux" and _resident() > MOST_RESIDENT:
        jax.clear_caches()
        gc.collect()
        ctypes.CDLL("libc.so.6").malloc_trim(0)


@pytest.fixture
def standard_jax():
    """Users' promotion, as the benchmarks have it."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


CHOSEN = pathlib.Path(__file__).with_name("chosen_slow_tests.txt")


def pytest_collection_modifyitems(config, items):
    """Marks what is slow beside fast cases, and what the list of chosen tests names."""
    chosen = collections.defaultdict(list)
    for name, *words in filter(None, map(str.split, CHOSEN.read_text().splitlines())):
        chosen[name].append(words)
    missing = set()
    for item in items:
        name, _, parameters = item.nodeid.partition("[")
        words = set(re.findall(r"\w+", parameters))
        if any(map(words.issuperset, chosen.get(name, ()))):
            item.add_marker("chosen")
        if (fast := item.get_closest_marker("fast")) is not None:
            missing.update((name, case) for case in fast.args)
            if item.callspec.id not in fast.args:
                item.add_marker("slow")
    missing -= {tuple(item.nodeid.removesuffix("]").split("[", 1)) for item in items}
    if missing and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"no such cases, of those that are fast: {missing}")


@pytest.fixture(autouse=True)
def searched_anew(request, monkeypatch):
    """No outcome of an earlier run's search, unless a test asks for `outcomes`."""
    if "outcomes" not in request.fixturenames:
        from jaxmem.scheduling import _finder

        without = lambda key, rewritten, search, seconds=None: search()
        monkeypatch.setattr(_finder, "on_disk", without)


@pytest.fixture
def outcomes(tmp_path, monkeypatch):
    """A folder for outcomes of searches, empty at first."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture
def untyped():
    """Public functions as users call them: without the tests' type checker in front."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def hidden_heap():
    """What the process holds already is not asked who refers to a leaked tracer.

    jax looks through all of it, which takes long where many tests ran before.
    """
    gc.freeze()
    yield
    gc.unfreeze()


def pytest_collection_finish():
    """What lives as long as the process is not searched for garbage."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)  # traces make much that is not garbage
