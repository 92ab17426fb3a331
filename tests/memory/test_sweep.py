"""`sweep`: a row for each size and chip, as a table, JSON, a page and a picture."""

import json

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.memory import DoesNotFit, MemoryReport, Sweep, estimate

AVAILABLE = {target.name for target in jaxmem.targets() if target.available}
needs_h100 = pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")


def struct(shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def make(width, batch=4):
    loss = lambda w, x: jnp.sum(jnp.tanh(x @ w) ** 2)
    return jax.grad(loss), (struct((width, width)), struct((batch, width)))


OVER = {"width": [16, 32], "batch": [2, 4, 8]}


@pytest.fixture(scope="module")
def found() -> Sweep:
    return jaxmem.sweep(make, OVER)


def test_a_row_is_what_estimate_says(found):
    combinations = [(w, b) for w in OVER["width"] for b in OVER["batch"]]
    assert [tuple(s.sizes.values()) for s in found.steps] == combinations
    for step in found.steps:
        fn, args = make(**step.sizes)
        assert step.peak_bytes == estimate(fn, *args).peak_bytes
        assert isinstance(step.report, MemoryReport)
        assert step.target == "cpu" and step.fits is None and step.seconds is None


def test_it_prints_as_a_table(found):
    head, *rows = str(found).splitlines()
    assert head.split() == ["width", "batch", "peak"] and len(rows) == 6
    assert rows[0].split()[:2] == ["16", "2"]


def test_its_json_has_all_rows(found):
    told = json.loads(found.to_json())
    assert told["names"] == ["width", "batch"]
    assert [r["peak_bytes"] for r in told["steps"]] == [
        s.peak_bytes for s in found.steps
    ]


@pytest.mark.parametrize("suffix", [".html", ".txt", ".json", ".png"])
def test_it_is_saved(found, tmp_path, suffix):
    path = tmp_path / f"sweep{suffix}"
    found.save(path)
    assert path.stat().st_size > 100


def test_options_are_those_of_estimate():
    """Of the call for all steps, of `make` for one."""
    update = lambda w, x: w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)

    def donating(width, donated):
        args = struct((width, width)), struct((8, width))
        return update, args, {"donate_argnums": (0,) if donated else ()}

    over = {"width": [64], "donated": [False, True]}
    kept, donated = jaxmem.sweep(donating, over).steps
    assert donated.report.alias_bytes == 64 * 64 * 4 and kept.report.alias_bytes == 0
    plain = lambda width: (update, (struct((width, width)), struct((8, width))))
    (step,) = jaxmem.sweep(plain, {"width": [64]}, donate_argnums=0).steps
    assert step.report.alias_bytes == 64 * 64 * 4


def test_what_the_compiler_refuses_is_a_row(monkeypatch):
    """On every chip that is named; what fits is told by the chip's memory."""

    def refuses(fn, *args, target, **how):
        if args[0].shape[0] == 32:
            raise DoesNotFit("'step' does not fit on cpu: too large")
        return estimate(fn, *args, target=target, **how)

    monkeypatch.setattr("jaxmem.memory.sweeps.combinations.estimate", refuses)
    found = jaxmem.sweep(make, {"width": [16, 32]}, ["cpu"])
    fits, refused = found.steps
    assert fits.peak_bytes and refused.peak_bytes is None and refused.fits is False
    assert "too large" in refused.why and "does not fit" in str(found)


def test_nothing_to_draw(monkeypatch, tmp_path):
    def refuses(*args, **how):
        raise DoesNotFit("too large")

    monkeypatch.setattr("jaxmem.memory.sweeps.combinations.estimate", refuses)
    found = jaxmem.sweep(make, {"width": [16]})
    with pytest.raises(ValueError, match="nothing to draw: no step"):
        found.plot(tmp_path / "sweep.png")


@pytest.mark.parametrize(
    "over, words",
    [
        ({"width": [2], "depth": [2]}, "unexpected keyword argument 'depth'"),
        ({"batch": [2]}, "missing a required argument: 'width'"),
    ],
)
def test_names_are_parameters(over, words):
    with pytest.raises(ValueError, match="over=") as caught:
        jaxmem.sweep(make, over)
    assert words in str(caught.value)


def test_what_make_returns():
    with pytest.raises(TypeError, match="make: returns .*, got list"):
        jaxmem.sweep(lambda width: [make, ()], {"width": [2]})


@needs_h100
def test_examples_a_second():
    """Where a chip has rates, and a name is the batch."""
    found = jaxmem.sweep(make, {"width": [64], "batch": [8, 16]}, "h100")
    assert "examples/s" in str(found) and "fits" in str(found)
    first, second = found.steps
    assert first.per_second == 8 / first.seconds
    assert second.per_second > first.per_second
