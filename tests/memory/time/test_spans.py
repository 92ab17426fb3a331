"""The step's time in its order, and its picture in a report's page."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.memory.report.clock import clock
from jaxmem.memory.time import spans
from jaxmem.memory.time.spans import TimeSpan, spans_of


def test_kernels_of_one_module_are_one_span():
    found = spans_of(
        [
            ("a", "memory", 2, 1.0),
            ("a", "products", 1, 3.0),
            ("b", "launch", 4, 0.5),
            ("a", "memory", 1, 1.0),
        ]
    )
    assert found == (
        TimeSpan(5.0, "a", "products", 3),
        TimeSpan(2.0, "b", "launch", 4),
        TimeSpan(1.0, "a", "memory", 1),
    )


def test_what_is_too_short_to_draw_joins_the_span_before_it(monkeypatch):
    monkeypatch.setattr(spans, "_MOST", 2)
    kernels = [
        ("a", "memory", 1, 4.0),
        ("b", "memory", 1, 1.0),
        ("c", "memory", 1, 2.0),
    ]
    first, second = spans_of(kernels)
    assert (first.module, first.seconds, first.kernels) == ("a", 5.0, 2)
    assert (second.module, second.seconds) == ("c", 2.0)


@pytest.fixture(scope="module")
def report():
    x = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
    loss = lambda w, x: jnp.tanh(jnp.tanh(x @ w) @ w).astype(jnp.float32).sum()
    return jaxmem.estimate(jax.grad(loss), x, x, target="h100")


def test_spans_add_up_to_the_step(report):
    found = report.time.spans
    assert sum(span.seconds for span in found) == pytest.approx(report.seconds)
    assert sum(span.kernels for span in found) == report.time.kernels
    again = type(report).from_json(report.to_json())
    assert again.time.spans == found


def test_the_page_draws_them_from_left_to_right(report):
    colours = {"(others)": "#888888"}
    time = dataclasses.replace(
        report.time,
        spans=tuple(dataclasses.replace(s, module="m") for s in report.time.spans),
    )
    html = str(clock(time, colours))
    widths = [float(w) for w in re.findall(r'<rect [^>]*width="([\d.]+)"', html)]
    assert len(widths) == len(time.spans) and sum(widths) == pytest.approx(1000, abs=1)
    assert "wait for" in html and "The slowest operations" in html
    assert str(clock(None, colours)) == ""
