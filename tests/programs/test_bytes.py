"""The peaks of the programs in big, compiled for a chip that is not there."""

import jax
import pytest

from benchmarks import programs
from benchmarks.figures.rows import NEWEST, row
from tests.memory.test_estimate import needs_h100
from tests.programs import PROGRAMS

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("standard_jax"), needs_h100]

# Of a figure that is written down: what another version of the compilers for absent
# chips may change, of which jax names only the least.
TOLERANCE = 0.05
WRITTEN = f"jax{jax.__version__}" == NEWEST


@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_never_worse_and_within_the_budget_or_the_least(program):
    plain, _, scheduled, _, budget, within, peak, _ = programs.measure(program)
    assert scheduled <= plain
    if within == "yes":
        assert peak <= budget
    elif within == "no":
        assert budget < peak <= scheduled
    if WRITTEN:
        held_to_what_is_written(program, plain, scheduled, within, peak)


def held_to_what_is_written(program, plain, scheduled, within, peak):
    """The same peaks; and what was within the budget is, or its least is no larger."""
    then = row(programs.FILE, {"program": program.name})
    written = [float(then[column]) for column in ("plain MiB", "scheduled MiB")]
    assert [plain, scheduled] == pytest.approx(written, rel=TOLERANCE)
    if then["within"] == "yes":
        assert within == "yes"
    elif then["within"] == "no" and within != "yes":
        assert within == "no"
        assert peak <= (1 + TOLERANCE) * float(then["with the budget MiB"])
