"""`jaxmem estimate`: what it accepts, prints and exits with."""

import json

import pytest

import jaxmem
from jaxmem.memory import DoesNotFit
from tests.cli.invoking import invoke


@pytest.mark.parametrize("where", ["user_steps", "user_steps.py", "./user_steps.py"])
def test_estimate_finds_a_module_or_a_file(steps, calls, where):
    result = invoke("estimate", f"{where}:plain", "--target", "h100")
    assert result.exit_code == 0, result.output
    (fn, args, options), *more = calls
    assert fn.__name__ == "step" and len(args) == 2 and not more
    assert options == {"target": "h100"}


def test_estimate_takes_options_from_the_function_and_lets_flags_win(steps, calls):
    invoke("estimate", "user_steps:with_options")
    invoke("estimate", "user_steps:with_options", "--target", "t4", "--donate", "1")
    assert calls[0][2] == {"donate_argnums": (0,), "target": "h100"}
    assert calls[1][2] == {"donate_argnums": (1,), "target": "t4"}


@pytest.mark.parametrize("limit, code", [("3GiB", 0), ("2 GiB", 0), ("1.5GiB", 1)])
def test_estimate_exits_1_where_the_step_does_not_fit(steps, calls, limit, code):
    result = invoke("estimate", "user_steps:plain", "--max", limit)
    assert result.exit_code == code
    assert "fit" not in result.output  # which are the words for the chip's memory
    told = "more than --max" if code else "within --max"
    assert told in result.output and ("512 MiB too much" in result.output) == code


@pytest.mark.parametrize(
    "spec, message",
    [
        ("user_steps", "MODULE:FUNCTION"),
        (":plain", "MODULE:FUNCTION"),
        ("no_such_module:plain", "no module"),
        ("no_such_file.py:plain", "no file"),
        ("user_steps:nothing", "no function"),
        ("user_steps:not_a_function", "int, no function"),
        ("user_steps:returns_none", "NoneType"),
        ("user_steps:args_as_list", "tuple"),
    ],
)
def test_bad_usage_exits_2_and_says_what_is_wrong(steps, calls, spec, message):
    result = invoke("estimate", spec)
    assert result.exit_code == 2
    (line,) = result.stderr.splitlines()
    assert message in line and "jaxmem" in line
    assert not calls


def test_a_size_that_is_none_is_refused_before_the_compile(steps, calls):
    result = invoke("estimate", "user_steps:plain", "--max", "14 parsecs")
    assert result.exit_code == 2 and "14 parsecs" in result.output
    assert not calls


def test_unknown_target_is_bad_usage(steps):
    result = invoke("estimate", "user_steps:plain", "--target", "h1000")
    assert result.exit_code == 2
    assert "h1000" in result.output and "h100" in result.output


def test_a_step_that_cannot_be_traced_exits_3(steps):
    result = invoke("estimate", "user_steps:not_traceable", "--target", "cpu")
    assert result.exit_code == 3
    lines = result.stderr.splitlines()
    assert "the step failed: TypeError: not_traceable cannot be traced" in lines[-1]
    assert "Traceback" not in result.output


def test_what_the_compiler_refuses_does_not_fit(steps, monkeypatch, calls):
    def refuse(*args, **options):
        raise DoesNotFit("'step' does not fit on h100:\nRESOURCE_EXHAUSTED")

    monkeypatch.setattr(jaxmem, "estimate", refuse)
    result = invoke("estimate", "user_steps:plain", "--target", "h100")
    assert result.exit_code == 1
    assert "does not fit on h100: RESOURCE_EXHAUSTED" in result.stderr


def test_the_limit_is_the_memory_of_the_chip(steps, calls, monkeypatch):
    assert "fits: " in invoke("estimate", "user_steps:with_options").stdout
    small = [jaxmem.memory.Target("h100", "cuda", 2**30, "H100")]
    monkeypatch.setattr(jaxmem, "targets", lambda: small)
    for limit in ((), ("--max", "3GiB")):
        result = invoke("estimate", "user_steps:with_options", *limit)
        assert result.exit_code == 1 and "does not fit: the peak" in result.stderr
        assert "1.00 GiB too much" in result.stderr


def test_estimate_for_cpu_prints_and_writes(steps):
    result = invoke(
        *("estimate", "user_steps:gradient", "--target", "cpu"),
        *("--json", "report.json", "--plot", "report.png", "--max", "1GiB"),
    )
    assert result.exit_code == 0, result.output
    assert "within --max" in result.output
    content = json.loads((steps / "report.json").read_text())
    # Two arguments of 64 x 64 in f32 and one result are 48 KiB.
    assert content["peak_bytes"] >= 3 * 64 * 64 * 4
    assert (steps / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_without_temporaries_has_no_picture(steps):
    where = "user_steps:plain", "--target", "cpu"
    result = invoke("estimate", *where, "--plot", "report.png")
    assert result.exit_code == 3
    assert "no picture" in result.output
