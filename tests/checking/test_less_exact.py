"""Steps that round more than their reference: how much passes, and what is told."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.checking import _compare
from jaxmem.checking._compare import noisy
from jaxmem.checking._tolerance import OUT_OF_DOUBT, Distance, Tolerance


def normalized(variance, x):
    """The gradient of a norm whose variance is computed in one way or another."""

    def loss(x):
        mean = x.mean(-1, keepdims=True)
        return jnp.sum(jnp.sin((x - mean) * jax.lax.rsqrt(variance(x, mean) + 1e-6)))

    return jax.grad(loss)(x)


def in_two_passes(x):
    centred = lambda x, mean: jnp.mean((x - mean) ** 2, -1, keepdims=True)
    return normalized(centred, x)


def in_one_pass(x):
    """Which loses the digits that squares and the mean's square have in common."""
    squares = lambda x, mean: jnp.mean(x * x, -1, keepdims=True) - mean * mean
    return normalized(squares, x)


def rows(offset):
    return offset + jax.random.normal(jax.random.key(0), (64, 256))


def check(step, reference, offset):
    return jaxmem.check(step, reference, rows(offset), carry=())


def test_a_step_that_rounds_more_passes_and_it_is_told():
    report = check(in_one_pass, in_two_passes, 10.0)
    assert report and report.leaves[0].rounding > 8, str(report)
    (told,) = [note for note in report.notes if "tolerances" in note]
    assert "of both: rounding moves result " in told and "times as far" in told


def test_roundings_of_the_reference_alone_are_not_enough(monkeypatch):
    """And where those of the step cannot be had, they are all there is."""

    def of_step(fn, static):
        if fn is in_one_pass:
            raise TypeError("not to be traced")
        return noisy(fn, static)

    monkeypatch.setattr(_compare, "noisy", of_step)
    report = check(in_one_pass, in_two_passes, 10.0)
    assert not report and 1 < report.leaves[0].ratio < OUT_OF_DOUBT
    (told,) = [note for note in report.notes if "not to be traced" in note]
    assert "rounding moves the step's results is not known: TypeError" in told


def test_a_wrong_step_that_rounds_more_is_found():
    wrong = lambda x: 1.001 * in_one_pass(x)
    report = check(wrong, in_two_passes, 10.0)
    assert not report and report.leaves[0].rounding > 8, str(report)
    assert any("does not account for the difference" in note for note in report.notes)


def test_a_step_that_rounds_far_more_is_found_and_it_is_told():
    report = check(in_one_pass, in_two_passes, 100.0)
    assert not report, str(report)
    (told,) = [note for note in report.notes if "it may be rounding alone" in note]
    assert "up to 8 times as far passes" in told


def test_a_step_that_is_more_exact_passes_and_nothing_is_told():
    report = check(in_two_passes, in_one_pass, 10.0)
    assert report and report.leaves[0].rounding is None
    assert not any("rounding" in note for note in report.notes)


@pytest.mark.parametrize(
    "step, allowed", [(0.0, 2.0), (1.0, 2.0), (6.0, 4.0), (16.0, 9.0), (1e9, 9.0)]
)
def test_half_of_a_tolerance_is_of_the_step(step, allowed):
    reference, own = Tolerance(2.0, 0.0, 2.0), Tolerance(step, step, step)
    both = reference.with_step(own)
    assert (both.largest, both.along) == (allowed, allowed)
    assert both.rms == 0  # what no rounding of the reference changes stays equal
    assert reference.times(own, Distance(1.0, 0.0, 0.0)) == step / 2
