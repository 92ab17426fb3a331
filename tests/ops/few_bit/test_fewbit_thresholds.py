"""The published figures of few-bit derivatives compiled anew (pytest -m slow)."""

import pytest

from benchmarks import fewbit

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_jax")]


@pytest.mark.parametrize("case", fewbit.SCAN_THRESHOLDS, ids=str)
def test_scan_with_frozen_next_weights(case):
    name, target = case
    temp, _ = fewbit.temp_and_ms(fewbit.ACTIVATIONS[name], target)
    assert temp <= fewbit.SCAN_THRESHOLDS[case]
    # what must be kept: the carries, and the code of 8 x 4096 x 4096 elements
    whole, _ = fewbit.temp_and_ms(fewbit.ACTIVATIONS["gelu, save=output"], target)
    assert temp < whole / 2


def test_tables_are_under_their_thresholds_and_the_package():
    for row in fewbit.table_rows(fewbit.kept_package()):
        _, _, error, _, package, threshold, met = row
        assert met != "no" and (not threshold or float(error) <= float(threshold))
        assert not package or float(error) < float(package)


def test_derivatives_from_the_output():
    assert all(row[-1] == "yes" for row in fewbit.output_rows())
