"""What the table says of versions, and what `lint` says of it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from benchmarks.figures.writer import FIGURES
from jaxmem.faults import FAULTS, standing, versions

HIT = next(fault for fault in FAULTS if fault.report == "xla#45912")


@pytest.mark.parametrize(
    ("version", "wanted"),
    [
        ((0, 7, 1), "not affected"),
        ((0, 7, 2), "affected"),
        ((0, 11, 0), "affected"),
        ((0, 11, 1), "not affected"),
        ((0, 12, 0, 1), "not affected"),
        ((0, 12, 1), "not checked yet"),
    ],
)
def test_a_range_of_versions(version, wanted):
    for platform in ("cpu", "cuda"):
        assert standing(HIT, platform, version) == wanted
    assert standing(HIT, "tpu", version) == "not affected"


def test_open_ranges_and_none():
    always = dataclasses.replace(HIT, affected=(None, None))
    never = dataclasses.replace(HIT, affected=None)
    for version in ((0, 5), HIT.looked_at[-1]):
        assert standing(always, "cpu", version) == "affected"
        assert standing(never, "cpu", version) == "not affected"
    newer = (*HIT.looked_at[-1][:-1], HIT.looked_at[-1][-1] + 1)
    for fault in (always, never):
        assert standing(fault, "cpu", newer) == "not checked yet"


def test_the_installed_version_is_the_default():
    told = standing(HIT, "cpu", jax.__version_info__)
    assert versions.installed() == jax.__version_info__
    assert standing(HIT, "cpu") == told


def test_rows_are_well_formed():
    for fault in FAULTS:
        assert fault.platforms and {*fault.platforms} <= {"cpu", "cuda", "tpu"}
        assert list(fault.looked_at) == sorted(fault.looked_at)
        first, last = fault.affected or (None, None)
        assert first is None or last is None or first <= last
        assert last is None or last <= fault.looked_at[-1]
        assert fault.address.startswith("https://github.com/")


def step(x):
    return jnp.sin(x) * 2


def test_a_version_beyond_the_table(of_version):
    of_version(*versions.newest(FAULTS))
    known = jaxmem.lint(step, jnp.ones(4))
    of_version(99, 0, 0)
    report = jaxmem.lint(step, jnp.ones(4))
    (new,) = [line for line in report.skipped if line not in known.skipped]
    assert new == "known faults: jax 99.0.0 was not checked yet"
    assert not any("not looked at" in line for line in known.skipped)


def test_the_table_as_the_documentation_has_it():
    text = FIGURES["known faults"]()
    head, _, *lines = text.splitlines()
    assert head == "| report | where | versions of jax | what | workaround |"
    assert len(lines) == len(FAULTS)
    for fault, line in zip(FAULTS, lines, strict=True):
        assert fault.report in line and fault.address in line and fault.what in line
        assert line.count(" | ") == 4
