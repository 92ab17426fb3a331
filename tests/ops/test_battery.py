"""Every op against its plain twin: dtype x transform x frozen subset x odd shapes."""

import importlib
import math
import pkgutil

import pytest

import tests.ops
from tests import twins
from tests.sets import one_of, slow_unless


def _families():
    names = (m.name for m in pkgutil.iter_modules(tests.ops.__path__))
    return [importlib.import_module(f"tests.ops.{n}") for n in names if "_twins" in n]


TWINS = [t for family in _families() for t in family.TWINS]
CASES = [(t, s, d) for t in TWINS for s in t.shapes for d in t.dtypes]

assert len({t.name for t in TWINS}) == len(TWINS), "the reference is kept by name"


def _id(case):
    return "-".join(map(str, case)).replace(" ", "")


def _largest(twin):
    return max(twin.shapes, key=math.prod)


def _some_cases_fast(cases, is_fast):
    marked = ((case, slow_unless(is_fast(*case))) for case in cases)
    return [pytest.param(c, marks=marks, id=_id(c)) for c, marks in marked]


def _first_dtype(twin, shape, dtype):
    """At the largest shape; the transformations below are those of the last dtype."""
    return shape == _largest(twin) and dtype == twin.dtypes[0]


@pytest.mark.parametrize("case", _some_cases_fast(CASES, _first_dtype))
def test_equals_plain_twin(case):
    twins.check_equal(*case, transform="jit")


TRANSFORMS = sorted(twins.TRANSFORMS)


def _one_transform_fast():
    """Every twin under every transformation; in the fast suite each under one."""
    for twin in TWINS:
        fast = TRANSFORMS[one_of(len(TRANSFORMS), twin.name)]
        for name in TRANSFORMS:
            marks = slow_unless(name == fast)
            yield pytest.param(twin, name, marks=marks, id=f"{twin}-{name}")


@pytest.mark.parametrize("twin, transform", [*_one_transform_fast()])
def test_under_transform(twin, transform):
    twins.check_equal(twin, twin.shapes[-1], twin.dtypes[-1], transform)


# With a single input there is nothing to freeze.
SEVERAL = [t for t in TWINS if len(t.diff) > 1]


@pytest.mark.parametrize("twin", SEVERAL, ids=str)
def test_all_inputs_but_one_frozen(twin):
    """One input, another with each twin; what is kept is held to every subset below."""
    wanted = twin.diff[one_of(len(twin.diff), twin.name)]
    twins.check_equal(twin, twin.shapes[-1], "float32", "scan", (wanted,))


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS, ids=str)
def test_frozen_subsets(twin):
    for wanted in twins.subsets(twin.diff):
        twins.check_equal(twin, twin.shapes[-1], "float32", "scan", wanted)


def _first_dtype_or_largest(twin, shape, dtype):
    return shape == _largest(twin) or dtype == twin.dtypes[0]


SAYS = [c for c in CASES if c[0].saves]


@pytest.mark.parametrize("case", _some_cases_fast(SAYS, _first_dtype_or_largest))
def test_keeps_what_it_says(case):
    twin, shape, dtype = case
    for wanted in twins.subsets(twin.diff):
        twins.check_saves(twin, shape, dtype, wanted)
