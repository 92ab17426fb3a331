"""The command line: what it accepts, prints and exits with."""

import json
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

import jaxmem
from jaxmem.cli import app

GIB = 2**30
STEPS = """
import jax, jax.numpy as jnp

x = jax.ShapeDtypeStruct((64, 64), jnp.float32)

def step(w, x):
    return w - jnp.tanh(x @ w)

def plain():
    return step, (x, x)

def with_options():
    return step, (x, x), {"donate_argnums": (0,), "target": "h100"}

def needs_arguments(n):
    return step, (x, x)

def returns_none():
    return None

def args_as_list():
    return step, [x, x]

def gradient():
    def loss(w, x):
        return jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
    return jax.grad(loss), (x, x)

def not_traceable():
    return (lambda x: x if x.sum() > 0 else -x), (x,)
"""


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """A module with steps in the current folder."""
    (tmp_path / "user_steps.py").write_text(textwrap.dedent(STEPS))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "user_steps", raising=False)
    yield tmp_path
    sys.modules.pop("user_steps", None)


@pytest.fixture
def calls(monkeypatch):
    """Puts a report of 2 GiB in the place of a compile; what it was asked for."""
    seen = []

    def estimate(fn, *args, **options):
        seen.append((fn, args, options))
        return SimpleNamespace(peak_bytes=2 * GIB, __rich__=lambda: "a report")

    monkeypatch.setattr(jaxmem, "estimate", estimate)
    return seen


def invoke(*args):
    return CliRunner().invoke(app, [str(a) for a in args])


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
    assert ("does not fit" in result.output) == (code == 1)
    if code:
        assert "0.500 GiB too much" in result.output


@pytest.mark.parametrize(
    "spec, message",
    [
        ("user_steps", "MODULE:FUNCTION"),
        (":plain", "MODULE:FUNCTION"),
        ("no_such_module:plain", "no module"),
        ("no_such_file.py:plain", "no file"),
        ("user_steps:nothing", "no function"),
        ("user_steps:x", "no function"),
        ("user_steps:needs_arguments", "no arguments"),
        ("user_steps:returns_none", "NoneType"),
        ("user_steps:args_as_list", "tuple"),
    ],
)
def test_bad_usage_exits_2_and_says_what_is_wrong(steps, calls, spec, message):
    result = invoke("estimate", spec)
    assert result.exit_code == 2
    assert message in _unboxed(result.output)
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
    assert "the step failed" in result.output


def test_estimate_for_cpu_prints_and_writes(steps):
    result = invoke(
        *("estimate", "user_steps:gradient", "--target", "cpu"),
        *("--json", "report.json", "--plot", "report.png", "--max", "1GiB"),
    )
    assert result.exit_code == 0, result.output
    assert "fits" in result.output
    content = json.loads((steps / "report.json").read_text())
    # Two arguments of 64 x 64 in f32 and one result are 48 KiB.
    assert content["peak_bytes"] >= 3 * 64 * 64 * 4
    assert (steps / "report.png").read_bytes().startswith(b"\x89PNG")


def test_a_step_without_temporaries_has_no_picture(steps):
    where = "user_steps:plain", "--target", "cpu"
    result = invoke("estimate", *where, "--plot", "report.png")
    assert result.exit_code == 3
    assert "no picture" in result.output


def test_targets_prints_the_table():
    result = invoke("targets")
    assert result.exit_code == 0, result.output
    assert "h100" in result.output and "tpu-v5e" in result.output


@pytest.mark.parametrize(
    "wrong",
    [
        ("--model", "torch"),
        ("--steps", "0"),
        ("--optimizer", "sgd"),
        ("--micro-batches", "3"),
    ],
    ids=lambda w: w[0],
)
def test_demo_refuses_bad_options(wrong, tmp_path):
    assert invoke("demo", *wrong, "--out", tmp_path).exit_code == 2


def test_demo_refuses_an_unknown_target_before_it_trains(tmp_path):
    result = invoke("demo", "--target", "h1000", "--out", tmp_path)
    assert result.exit_code == 2 and "h1000" in result.output


@pytest.mark.parametrize(
    "flags, optimizer, n",
    [
        ((), "adamw", 1),
        (("--micro-batches", "4"), "adamw", 4),
        (("--optimizer", "adama"), "adama", 8),
        (("--optimizer", "adama", "--micro-batches", "2"), "adama", 2),
    ],
)
def test_demo_takes_an_optimizer(flags, optimizer, n, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("jaxmem.demo.run", lambda *args: seen.append(args[0]))
    result = invoke("demo", *flags, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert (seen[0].optimizer, seen[0].n) == (optimizer, n)


def test_help_shows_the_convention_and_needs_no_jax():
    code = (
        "import sys; from jaxmem.cli import main; sys.argv = ['jaxmem', 'estimate', "
        "'--help']\ntry: main()\nexcept SystemExit: pass\n"
        "assert not {'jax', 'flax', 'optax', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "train_step" in done.stdout and "donate_argnums" in done.stdout


def _unboxed(text):
    """Typer's error box breaks lines; what it says without the box."""
    return " ".join(text.replace("│", " ").split())
