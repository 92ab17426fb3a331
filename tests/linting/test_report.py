"""The report, and what goes wrong."""

import json

import jax
import jax.numpy as jnp
import pytest
import rich.console

import jaxmem
from jaxmem.linting import Finding, LintReport
from jaxmem.linting._report import merged

SDS = jax.ShapeDtypeStruct
X = SDS((64, 64), jnp.float32)


def layered(weights, x):
    """Each layer keeps a wide copy, under a name of its own."""
    for i, w in enumerate(weights):
        with jax.named_scope(f"layer_{i}"):
            x = jnp.square((x @ w).astype(jnp.float32)).astype(jnp.bfloat16)
    return jnp.sum(x.astype(jnp.float32))


def report():
    weights = [SDS((64, 64), jnp.bfloat16)] * 6
    return jaxmem.lint(jax.grad(layered), weights, SDS((64, 64), jnp.bfloat16))


def test_layers_alike_are_one_finding():
    (found,) = report().of("wide copy")
    assert found.count == 6 and found.path == "layer_*"
    assert found.bytes == 6 * 64 * 64 * 2


def test_prints_as_text_and_as_a_table():
    found = report()
    text = str(found)
    assert text.startswith("layered: 1 warning") and "48.0 KiB" in text
    assert "no target" in text
    console = rich.console.Console(width=200)
    with console.capture() as captured:
        console.print(found)
    table = captured.get()
    assert "layer_*" in table and "float32[64,64]" in table and "(6 times)" in table


def test_json_has_every_field():
    found = json.loads(report().to_json())
    (finding,) = found["findings"]
    assert finding["check"] == "wide copy" and finding["bytes"] == 6 * 64 * 64 * 2
    assert found["name"] == "layered" and found["skipped"]


def test_errors_come_first_and_then_what_is_dearest():
    made = [
        Finding("c", severity, f"{severity} {size}", "", "", bytes=size)
        for severity in ("note", "error", "warning")
        for size in (1, 3, 2)
    ]
    order = [f.what for f in merged(made)]
    assert order[:4] == ["error 3", "error 2", "error 1", "warning 3"]
    assert LintReport("step", merged(made))._headline() == (
        "step: 3 errors, 3 warnings, 3 notes"
    )


def test_a_function_without_a_backward_pass_is_told():
    found = jaxmem.lint(lambda x: jnp.sum(x), X)
    assert any("no backward pass" in line for line in found.skipped)
    assert not any("no backward pass" in line for line in report().skipped)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: jaxmem.lint(3, X), TypeError, "step=3: a function"),
        (lambda: jaxmem.lint(jnp.sin, X, target="h1000"), ValueError, "h1000"),
        (lambda: jaxmem.lint(jnp.sin, X, donate_argnums=4), ValueError, "positional"),
        (lambda: jaxmem.lint(lambda x, y: x, X, "x"), TypeError, "neither an array"),
        (lambda: jaxmem.lint(lambda x: x @ x[0, 0], X), ValueError, "these arguments"),
    ],
)
def test_bad_input(call, error, message):
    with pytest.raises(error, match=message):
        call()
