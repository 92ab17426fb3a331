"""The slow tests that CI runs are tests that exist."""

import pathlib

import pytest

from tests.conftest import CHOSEN

ROOT = pathlib.Path(__file__).parent.parent
NAMES = [x.split()[0] for x in CHOSEN.read_text().splitlines() if x and x[0] != "#"]


@pytest.mark.parametrize("name", NAMES)
def test_a_slow_test_of_this_name_exists(name):
    path, _, function = name.partition("::")
    assert f"def {function}(" in (ROOT / path).read_text()
