"""Thresholds of selective differentiation: traced alone, nothing is compiled."""

import pytest

from benchmarks import frozen


@pytest.mark.slow
def test_resnet_input_gradients():
    """ResNet-101, the input's gradient alone, batch norm in inference mode."""
    cases = ("all", "input alone", "norms")
    found = frozen.rows(frozen.kept, ["ResNet-101"], cases)
    rows = {case: rest for _, case, *rest in found}
    assert rows["input alone"][3] <= frozen.THRESHOLDS["ResNet-101", "input alone"]
    for plain, lean, *_ in rows.values():
        assert lean < 0.35 * plain
