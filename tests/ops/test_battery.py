"""Every op against its plain twin: dtype x transform x frozen subset x odd shapes."""

import importlib
import math
import pkgutil

import pytest

import tests.ops
from tests import twins


def _families():
    names = (m.name for m in pkgutil.iter_modules(tests.ops.__path__))
    return [importlib.import_module(f"tests.ops.{n}") for n in names if "_twins" in n]


TWINS = [t for family in _families() for t in family.TWINS]
CASES = [(t, s, d) for t in TWINS for s in t.shapes for d in t.dtypes]

assert len({t.name for t in TWINS}) == len(TWINS), "the reference is kept by name"


def _id(case):
    return "-".join(map(str, case)).replace(" ", "")


def _one_case_fast(case):
    """The first dtype at the largest shape; the others are slow.

    The transformations below are those of the last dtype.
    """
    twin, shape, dtype = case
    fast = shape == max(twin.shapes, key=math.prod) and dtype == twin.dtypes[0]
    return pytest.param(case, marks=() if fast else pytest.mark.slow, id=_id(case))


@pytest.mark.parametrize("case", [_one_case_fast(c) for c in CASES])
def test_equals_plain_twin(case):
    twins.check_equal(*case, transform="jit")


def _one_transform_fast():
    """Every twin under every transformation; in the fast suite each under one."""
    names = sorted(twins.TRANSFORMS)
    for i, twin in enumerate(TWINS):
        for k, name in enumerate(names):
            fast = (k - i) % len(names) == 0
            marks = () if fast else pytest.mark.slow
            yield pytest.param(twin, name, marks=marks, id=f"{twin}-{name}")


@pytest.mark.parametrize("twin, transform", [*_one_transform_fast()])
def test_under_transform(twin, transform):
    twins.check_equal(twin, twin.shapes[-1], twin.dtypes[-1], transform)


@pytest.mark.parametrize("i, twin", [*enumerate(TWINS)], ids=str)
def test_all_inputs_but_one_frozen(i, twin):
    """One input, another with each twin; what is kept is held to every subset below."""
    wanted = twin.diff[i % len(twin.diff)]
    twins.check_equal(twin, twin.shapes[-1], "float32", "scan", (wanted,))


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_frozen_subsets(twin):
    for wanted in twins.subsets(twin.diff):
        twins.check_equal(twin, twin.shapes[-1], "float32", "scan", wanted)


@pytest.mark.parametrize("case", [c for c in CASES if c[0].saves], ids=_id)
def test_keeps_what_it_says(case):
    twin, shape, dtype = case
    for wanted in twins.subsets(twin.diff):
        twins.check_saves(twin, shape, dtype, wanted)
