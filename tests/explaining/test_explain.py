"""What is taken, how it is printed, and what the step itself adds."""

import io
import json
import pathlib
import types

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

import jaxmem
from jaxmem.explaining import Explanation, _estimated
from jaxmem.explaining._diagnosis import diagnose
from jaxmem.explaining._facts import Facts
from tests.explaining.test_logs import EXPECTED, LOGS

GIB = 2**30
SHORT = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate {}GiB."


def _raised() -> Exception:
    """As of a training loop that catches and raises again."""
    try:
        try:
            raise RuntimeError(f"{SHORT.format('20.00')} [executable_name='jit_step']")
        except RuntimeError:
            raise ValueError("training failed") from None
    except ValueError as error:
        return error


def test_an_exception_is_read_with_its_causes():
    found = jaxmem.explain(_raised())
    assert (found.program, found.requested_bytes) == ("step", 20 * GIB)
    assert found.line.startswith("test_explain.py:")


def test_a_path_and_a_text_are_read_alike(monkeypatch):
    path = LOGS / "tpu_table.txt"
    monkeypatch.chdir(LOGS)
    found = jaxmem.explain(path)
    assert found == jaxmem.explain(path.read_text()) == jaxmem.explain(path.name)


@pytest.mark.parametrize("text", ["Loss: nan", "RESOURCE_EXHAUSTED: too many requests"])
def test_a_text_without_such_an_error_says_what_was_looked_for(text):
    with pytest.raises(ValueError, match="no out-of-memory error; looked for were"):
        jaxmem.explain(text)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(ValueError, match=r"log\.txt.*can be read"):
        jaxmem.explain(tmp_path / "log.txt")


def test_the_last_of_several_errors_is_explained():
    logs = [(LOGS / f"{name}.txt").read_text() for name in ("gpu_short", "tpu_table")]
    assert jaxmem.explain("\n".join(logs)).device == "TPU"
    assert jaxmem.explain("\n".join(logs[::-1])).device == "GPU"


def test_warnings_of_trials_are_not_the_error():
    trial = "W gemm_fusion_autotuner.cc:1] Autotuning: out of memory, trying another\n"
    steps = "step 1: loss 2.5\n" * 100
    found = jaxmem.explain(f"{trial}{steps}JaxRuntimeError: {SHORT.format(20)}")
    assert found.diagnosis == "unknown"


@pytest.mark.parametrize("gib, diagnosis", [("90.00", "true peak"), (9, "unknown")])
def test_a_target_gives_the_memory(gib, diagnosis):
    found = jaxmem.explain(SHORT.format(gib), target="h100")
    assert found.diagnosis == diagnosis
    (memory,) = (t.memory_bytes for t in jaxmem.targets() if t.name == "h100")
    assert found.limit_bytes == memory
    assert 'budget="' in found.advice[-2].line


def test_a_small_request_is_no_true_peak():
    assert jaxmem.explain(SHORT.format("0.01")).diagnosis == "live arrays"


def test_options_need_a_step():
    with pytest.raises(ValueError, match="need a step"):
        jaxmem.explain(SHORT.format(9), donate_argnums=0)


@pytest.mark.parametrize("name", EXPECTED)
def test_what_is_printed_fits_80_columns_and_60(name):
    found = jaxmem.explain(LOGS / f"{name}.txt")
    code = {line.strip() for a in found.advice for line in a.line.splitlines()}
    prose = [line for line in str(found).splitlines() if line.strip() not in code]
    assert max(map(len, prose)) <= 80
    assert found.diagnosis in prose[0] + prose[1]
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(found)
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 60
    assert found.diagnosis in " ".join(text.split())


def test_it_is_written_as_json_and_as_a_page(tmp_path):
    found = jaxmem.explain(LOGS / "tpu_padding.txt")
    data = json.loads(found.to_json())
    assert data["diagnosis"] == "padding"
    assert data["advice"][0]["line"] == "x = jnp.moveaxis(x, 1, -1)"
    found.save(tmp_path / "found.html")
    assert "jnp.moveaxis(x, 1, -1)" in (tmp_path / "found.html").read_text()


def step(w, x):
    with jax.named_scope("head"):
        y = jnp.sort(jnp.tanh(x @ w), axis=0)
    return w - 1e-3 * (x.T @ y)


ARGS = (
    jax.ShapeDtypeStruct((256, 256), "float32"),
    jax.ShapeDtypeStruct((4096, 256), "float32"),
)


def test_a_step_tells_what_is_largest_by_module_and_line():
    report = jaxmem.estimate(step, *ARGS)
    log = SHORT.replace("GiB", " bytes").format(report.temp_bytes)
    found = jaxmem.explain(log, step, *ARGS)
    assert found.needed_bytes == report.peak_bytes and found.program == "step"
    assert any("head" in b.module for b in found.largest)
    assert any(b.source.startswith("test_explain.py:") for b in found.largest)
    assert "are its temporaries" in found.notes[0]
    other = jaxmem.explain(SHORT.format(20), step, *ARGS)
    assert "another program" in other.notes[0]


def test_a_step_that_fits_is_not_the_cause():
    log = (LOGS / "gpu_bfc_dump.txt").read_text()
    found = jaxmem.explain(log, step, *ARGS)
    assert found.diagnosis == "live arrays"
    assert "fit alone" in found.reason


@pytest.fixture
def without_rows(monkeypatch):
    monkeypatch.setattr(_estimated, "groups_of", lambda report: [])


def _report(gib: float) -> types.SimpleNamespace:
    size = int(gib * GIB)
    return types.SimpleNamespace(
        name="step", target="l4", at_peak=(), timeline=(), placed=(), advice=(),
        peak_bytes=size, argument_bytes=0, output_bytes=0, alias_bytes=0,
        temp_bytes=size, memory_bytes=22 * GIB,
    )  # fmt: skip


@pytest.mark.parametrize(
    "gib, diagnosis", [(2, "live arrays"), (19, "pool limit"), (30, "true peak")]
)
def test_what_a_step_takes_of_a_gpu_decides(monkeypatch, without_rows, gib, diagnosis):
    """19 of 22 GiB are more than the three quarters that JAX takes by default."""
    monkeypatch.setattr(_estimated, "estimate", lambda *args, **how: _report(gib))
    assert jaxmem.explain(SHORT.format(2), step).diagnosis == diagnosis


def test_a_tpu_that_refuses_a_step_is_exchanged_for_a_larger_one(
    monkeypatch, without_rows
):
    asked = []

    def estimate(*args, target, **how):
        asked.append(getattr(target, "name", target))
        if len(asked) == 1:
            raise jaxmem.memory.DoesNotFit("'step' does not fit on tpu-v5e")
        return _report(30)

    monkeypatch.setattr(_estimated, "estimate", estimate)
    log = (LOGS / "tpu_e1000.txt").read_text()
    found = jaxmem.explain(log, step, target="tpu-v5e")
    assert asked == ["tpu-v5e", "tpu-v5p"]
    assert found.limit_bytes == 15.75 * GIB


def test_what_a_tpu_calls_temporaries_has_arguments_in_it():
    found = jaxmem.explain(LOGS / "tpu_e1000.txt")
    assert found.reason.startswith("the program alone needs more")


@pytest.mark.slow
def test_the_refusal_of_a_tpu_counts_arguments_and_outputs():
    """10 GiB in, 10 out, nothing between."""
    x = jax.ShapeDtypeStruct((10 * 2**18, 1024), "float32")
    with pytest.raises(jaxmem.memory.DoesNotFit) as refused:
        jaxmem.estimate(jnp.sin, x, target="tpu-v5e")
    found = jaxmem.explain(refused.value)
    assert (found.needed_bytes, found.diagnosis) == (20 * GIB, "true peak")
    assert found.line.startswith("test_explain.py:")


@pytest.mark.parametrize(
    "changed, diagnosis",
    [
        ({"requested": 8, "limit": 10, "in_use": 1, "free": 9}, "fragmentation"),
        ({"requested": 8, "refused": 8}, "another process"),
        ({"requested": 80, "device_total": 40, "device_free": 10}, "true peak"),
        ({"constants": 5, "needed": 10}, "constants"),
    ],
)
def test_the_cause_of_a_failed_allocation(changed, diagnosis):
    sizes = {name: size * GIB for name, size in changed.items()}
    assert diagnose(Facts("run", "GPU", **sizes)) == diagnosis


def test_an_error_of_the_real_compiler_is_read():
    """XLA:CPU's own, on this machine."""
    assert isinstance(jaxmem.explain(_of_cpu()), Explanation)


def _of_cpu() -> Exception:
    try:
        jax.block_until_ready(jnp.zeros((2**22, 2**22), "float32"))
    except Exception as error:
        return error
    raise AssertionError("64 TiB were allocated")


def test_logs_are_small():
    assert all(path.stat().st_size < 6000 for path in pathlib.Path(LOGS).iterdir())
