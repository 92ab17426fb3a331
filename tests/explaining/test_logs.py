"""A log of each kind that users post: the program, what is largest, cause and line."""

import pathlib
from typing import NamedTuple

import pytest

import jaxmem

LOGS = pathlib.Path(__file__).parent / "logs"


class Expected(NamedTuple):
    """What a reader of the log would say."""

    stage: str
    device: str
    program: str
    largest: str  # the array of the largest buffer, and its place
    diagnosis: str
    line: str  # words of a line to write


SCHEDULE = "jaxmem.schedule(step, budget="
FRACTION = "XLA_CLIENT_MEM_FRACTION="
LIMIT = 'memory_stats()["bytes_limit"]'
DONATE = "donate_argnums=0"
EXPECTED = {
    "gpu_bfc_dump": Expected(
        "run", "GPU", "train_step", "", "true peak", f'{SCHEDULE}"11.3GiB")'
    ),
    "gpu_short": Expected("run", "GPU", "", "", "unknown", LIMIT),
    "gpu_buffer_assignment": Expected(
        *("run", "GPU", "train_step"),
        "f32[8,1024,49152] Decoder/head model.py:141",
        *("true peak", DONATE),
    ),
    "gpu_async_pool": Expected(
        "run", "GPU", "evaluate", "", "pool limit", f"{FRACTION}.95"
    ),
    "gpu_preallocation": Expected(
        *("start", "GPU", "", "", "another process"),
        "XLA_PYTHON_CLIENT_PREALLOCATE=false",
    ),
    "gpu_fragmentation": Expected(
        *("run", "GPU", "", "", "fragmentation"),
        "XLA_PYTHON_CLIENT_ALLOCATOR=cuda_async",
    ),
    "gpu_cudnn": Expected(
        "library", "GPU", "", "", "no room for libraries", f"{FRACTION}.65"
    ),
    "gpu_cusolver": Expected(
        "library", "GPU", "", "", "no room for libraries", f"{FRACTION}.65"
    ),
    "gpu_autotuning": Expected(
        *("run", "GPU", "decode", "", "autotuning"),
        "--xla_gpu_strict_conv_algorithm_picker=false",
    ),
    "gpu_constants": Expected("run", "GPU", "step", "", "constants", "table: ..."),
    "gpu_rematerialization": Expected(
        "run", "GPU", "train_step", "", "true peak", f'{SCHEDULE}"49.4GiB")'
    ),
    "gpu_other_process": Expected(
        "run", "GPU", "train_step", "", "another process", f"{FRACTION}.47"
    ),
    "gpu_full": Expected(
        "run", "GPU", "update", "", "live arrays", "jaxmem.live_arrays(state=state)"
    ),
    "tpu_table": Expected(
        *("compile", "TPU", "train_step"),
        "bf16[32,16,16,512,512] Transformer/layers/attention attention.py:88",
        *("true peak", f'{SCHEDULE}"15.7GiB")'),
    ),
    "tpu_padding": Expected(
        *("compile", "TPU", "encode"),
        "f32[8,4096,1536,1] Encoder/stem encoder.py:54",
        *("padding", "jnp.moveaxis(x, 1, -1)"),
    ),
    "tpu_e1000": Expected(
        "compile", "TPU", "pretrain_step", "", "true peak", f'{SCHEDULE}"15.7GiB")'
    ),
    "tpu_run": Expected(
        "run", "TPU", "", "", "live arrays", "jaxmem.live_arrays(state=state)"
    ),
    "tpu_load": Expected(
        "load", "TPU", "generate", "", "fragmentation", "jax.clear_caches()"
    ),
    "tpu_vmem": Expected(
        "kernel", "TPU", "attend", "", "kernel memory", "vmem_limit_kib=24576"
    ),
    "host_killed": Expected("host", "host", "", "", "host memory", "out_shardings"),
    "host_numpy": Expected(
        "host", "host", "", "f64[400000,4096]", "host memory", 'mmap_mode="r"'
    ),
    "host_pinned": Expected(
        "host", "host", "", "", "host memory", "HOST_MEMORY_LIMIT_GB=140"
    ),
}


def test_every_log_is_expected():
    assert {path.stem for path in LOGS.glob("*.txt")} == set(EXPECTED)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_log_is_explained(name):
    found = jaxmem.explain(LOGS / f"{name}.txt")
    first = next((b for b in found.largest if b.array), None)
    where = [first.array, first.module, first.source] if first else []
    lines, expected = "\n".join(a.line for a in found.advice), EXPECTED[name]
    assert (found.stage, found.device) == expected[:2]
    assert (found.program, found.diagnosis) == (expected.program, expected.diagnosis)
    assert " ".join(filter(None, where)) == expected.largest
    assert expected.line in lines, lines


GIB = 2**30
SIZES = {  # requested, needed, limit, in use, free, the largest free piece
    "gpu_bfc_dump": (9.25, None, 11.97, 5.25, 6.72, 6.72),
    "gpu_fragmentation": (3, None, 14.5, 10, 4.5, 2.5),
    "gpu_buffer_assignment": (8.12, 17.12, None, None, None, None),
    "gpu_cudnn": (None, None, 11.76, None, 0.08, None),
    "tpu_table": (None, 20.11, 15.75, None, None, None),
    "tpu_load": (6.48, None, None, None, 6.78, 3.33),
    "tpu_run": (2, None, None, None, 1.21, None),
    "host_killed": (None, None, None, 60, None, None),
}


@pytest.mark.parametrize("name", SIZES)
def test_the_figures_are_those_of_the_log(name):
    found = jaxmem.explain(LOGS / f"{name}.txt")
    got = (
        *(found.requested_bytes, found.needed_bytes, found.limit_bytes),
        *(found.in_use_bytes, found.free_bytes, found.largest_free_bytes),
    )
    in_gib = [None if size is None else size / GIB for size in got]
    for size, expected in zip(in_gib, SIZES[name], strict=True):
        assert size == (None if expected is None else pytest.approx(expected, abs=0.01))


LINES = {
    "gpu_short": "finetune.py:188",
    "gpu_cudnn": "fit.py:40",
    "gpu_autotuning": "sample.py:63",
    "tpu_run": "learner.py:77",
    "tpu_table": "",
}


@pytest.mark.parametrize("name", LINES)
def test_the_line_is_the_innermost_of_the_user(name):
    assert jaxmem.explain(LOGS / f"{name}.txt").line == LINES[name]


def test_undonated_state_is_told_with_its_bytes():
    told = {
        name: jaxmem.explain(LOGS / f"{name}.txt").advice[0].why
        for name in ("gpu_buffer_assignment", "tpu_table")
    }
    assert "4.50 GiB" in told["gpu_buffer_assignment"]
    assert "6.05 GiB" in told["tpu_table"]


def test_equal_buffers_are_one_row_and_padding_is_told():
    table = jaxmem.explain(LOGS / "gpu_buffer_assignment.txt").largest
    assert [(b.count, b.operation) for b in table if b.count > 1] == [(2, "argument")]
    assert sum(b.bytes for b in table) == 3.75 * GIB
    (padded,) = jaxmem.explain(LOGS / "tpu_padding.txt").largest
    assert padded.padding_bytes == pytest.approx(23.81 * GIB)


def test_the_pieces_of_an_allocator_are_shown_without_the_small_ones():
    found = jaxmem.explain(LOGS / "gpu_bfc_dump.txt")
    assert [(b.count, b.bytes / GIB) for b in found.largest] == [
        (2, 3),
        (4, pytest.approx(2.25, abs=0.01)),
    ]
    assert "2 chunks of 1.50 GiB" in str(found)
