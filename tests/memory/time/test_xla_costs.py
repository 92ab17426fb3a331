"""Predicted kernels of an H100 against XLA's own cost model, where it knows them."""

import statistics

import pytest

from tests.memory.time import modules

WITHIN = 0.15  # of the median; the share of the bandwidth that loops reach was measured
FAR = 2.0  # times: XLA's model of what it does not know

PREDICT = """
import json
from benchmarks import time
from benchmarks.readings.xla_costs import COSTS, costed
print(json.dumps({one.name: time.beside_xla(one) for one in costed(COSTS)}))
"""


@pytest.fixture(scope="module")
def steps():
    return modules.printed(PREDICT)


def ratios(kernels):
    return [said / of_xla for _, of_xla, said in kernels]


def test_there_are_five_steps(steps):
    assert len(steps) == 5


@pytest.mark.parametrize("kind", ["loops", "transpositions"])
def test_plain_fusions_are_as_xla_has_them(steps, kind):
    of = [ratio for step in steps.values() for ratio in ratios(step[kind])]
    assert len(of) > 30
    assert statistics.median(of) == pytest.approx(1, abs=WITHIN)
    for step in steps.values():
        middle = statistics.median(ratios(step["loops"]))
        assert middle == pytest.approx(1, abs=WITHIN)


@pytest.mark.parametrize("kind", ["products", "Triton's"])
def test_what_xla_does_not_know_is_not_taken_from_it(steps, kind):
    """Ours is held to what an H200 has taken, see `test_measured.py`."""
    of = [ratio for step in steps.values() for ratio in ratios(step.get(kind, []))]
    assert len(of) > 5
    assert statistics.median(of) < 1 / FAR
