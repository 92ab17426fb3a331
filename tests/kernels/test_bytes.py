"""What the kernels hold beside XLA, as it was compiled for both kinds of chips."""

import pytest

from benchmarks._common import published
from benchmarks.kernels import numbers

ROWS = {(row[0], row[1]): numbers(row) for row in published("kernels")}


@pytest.mark.parametrize("name, chip", ROWS)
def test_a_kernel_holds_no_more_than_xla(name, chip):
    _, _, status, xla, kernel, *_ = ROWS[name, chip]
    assert kernel <= xla if status == "compiles" else status == "there is none"
