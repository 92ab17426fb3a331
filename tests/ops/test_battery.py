"""Every op against plain JAX: dtype x transform x frozen subset x odd shapes."""

import importlib
import math
import pkgutil
import re

import pytest

import tests.ops
from tests import references
from tests.sets import one_of, slow_unless


def _families():
    modules = pkgutil.walk_packages(tests.ops.__path__, "tests.ops.")
    names = (m.name for m in modules if m.name.endswith("_references"))
    return [importlib.import_module(name) for name in names]


COMPARISONS = [t for family in _families() for t in family.COMPARISONS]
CASES = [(t, s, d) for t in COMPARISONS for s in t.shapes for d in t.dtypes]

assert len({t.name for t in COMPARISONS}) == len(COMPARISONS), (
    "the reference is kept by name"
)


def _id(case):
    return "-".join(map(str, case)).replace(" ", "")


def _largest(comparison):
    return max(comparison.shapes, key=math.prod)


def _some_cases_fast(cases, is_fast):
    marked = ((case, slow_unless(is_fast(*case))) for case in cases)
    return [pytest.param(c, marks=marks, id=_id(c)) for c, marks in marked]


def _first_dtype(comparison, shape, dtype):
    """At the largest shape; the transformations below are those of the last dtype."""
    return shape == _largest(comparison) and dtype == comparison.dtypes[0]


@pytest.mark.parametrize("case", _some_cases_fast(CASES, _first_dtype))
def test_equals_plain_comparison(case):
    references.check_equal(*case, transform="jit")


TRANSFORMS = sorted(references.TRANSFORMS)
_OPTION = re.compile(r"(_(input|output|bit|code|beta|array|negative|zero|2))+$|[ ,].*")
# The first comparison of each op, and no stored one; the others differ in options.
_PLAIN = sorted(COMPARISONS, key=lambda t: t.name.endswith(" bits"))
FIRST = {_OPTION.sub("", t.name): t for t in reversed(_PLAIN)}.values()


def _one_transform_fast():
    """Every comparison under every transformation; fast is each op under one."""
    for comparison in COMPARISONS:
        fast = TRANSFORMS[one_of(len(TRANSFORMS), comparison.name)]
        for name in TRANSFORMS:
            marks = slow_unless(name == fast and comparison in FIRST)
            yield pytest.param(comparison, name, marks=marks, id=f"{comparison}-{name}")


@pytest.mark.parametrize("comparison, transform", [*_one_transform_fast()])
def test_under_transform(comparison, transform):
    references.check_equal(
        comparison, comparison.shapes[-1], comparison.dtypes[-1], transform
    )


# With a single input there is nothing to freeze.
SEVERAL = [
    pytest.param(t, marks=slow_unless(t in FIRST)) for t in COMPARISONS if t.diff[1:]
]


@pytest.mark.parametrize("comparison", SEVERAL, ids=str)
def test_all_inputs_but_one_frozen(comparison):
    """One input, another with each; what is kept is held to every subset below."""
    wanted = comparison.diff[one_of(len(comparison.diff), comparison.name)]
    references.check_equal(
        comparison, comparison.shapes[-1], "float32", "scan", (wanted,)
    )


@pytest.mark.slow
@pytest.mark.parametrize("comparison", COMPARISONS, ids=str)
def test_frozen_subsets(comparison):
    for wanted in references.subsets(comparison.diff):
        references.check_equal(
            comparison, comparison.shapes[-1], "float32", "scan", wanted
        )


def _every_dtype(comparison, shape, dtype):
    """At the largest shape."""
    return shape == _largest(comparison)


SAYS = [c for c in CASES if c[0].saves]


@pytest.mark.parametrize("case", _some_cases_fast(SAYS, _every_dtype))
def test_keeps_what_it_says(case):
    comparison, shape, dtype = case
    for wanted in references.subsets(comparison.diff):
        references.check_saves(comparison, shape, dtype, wanted)
