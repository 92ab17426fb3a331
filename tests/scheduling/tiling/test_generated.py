"""Generated steps in tiles give what they gave, to rounding.

In float64, where an operation moved is told from one changed, results may be off by
m u of the largest, where m counts the roundings on the longest path of the jaxpr
(`roundings`) and u is half of eps. A step in a narrower dtype is held to itself in
float64: in tiles it may be off by 4 eps of the largest result (the additional results
that a loop writes), and by twice what the step as it was is off.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.ir import jaxprs
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.tiling.tiles import Tiles
from tests.scheduling.tiling.generated import Generated, generated
from tests.scheduling.tiling.roundings import longest
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")

SEEDS = range(300)
FAST = (34, 160)
COUNTS = (2, 3, 4, 8)


def traced(step: Generated):
    return jaxprs.trace(step.step, *step.args).jaxpr


def tiled(closed, n: int | None) -> Rewritten:
    """The step with all that can be in tiles, `n` of them; None: no tiles."""
    tiles = Tiles() if n is None else Tiles(limit=0, n=n)
    return rewrite(closed, {}, choice=Choice("cpu", (tiles,)))


def run(closed, args) -> list[np.ndarray]:
    """What a jaxpr gives, in float64."""
    compiled = jax.jit(functools.partial(jaxprs.evaluate, closed))
    return [np.asarray(x, np.float64) for x in compiled(jax.tree.leaves(args))]


def apart(found: list[np.ndarray], wanted: list[np.ndarray]) -> float:
    """The largest difference, in parts of the largest number."""
    # that of all results: where terms cancel, what is left has the terms' rounding
    scale = max(float(np.abs(x).max()) for x in wanted) or 1.0  # all are zero
    pairs = zip(found, wanted, strict=True)
    return max(float(np.abs(x - y).max()) for x, y in pairs) / scale


def wanted_and_most(step: Generated, closed) -> tuple[list[np.ndarray], float]:
    """What the step should give, and how far a result may be off."""
    plain, eps = run(closed, step.args), float(jnp.finfo(step.dtype).eps)
    if step.dtype == jnp.float64:
        return plain, longest(closed) * eps / 2
    exact = run(traced(generated(step.seed, jnp.float64)), step.args)
    return exact, 4 * eps + 2 * apart(plain, exact)


@pytest.mark.fast("34")
@pytest.mark.parametrize("seed", some_fast(SEEDS, *FAST))
def test_values(seed):
    step = generated(seed)
    closed = traced(step)
    wanted, most = wanted_and_most(step, closed)
    assert all(np.isfinite(x).all() for x in wanted), step
    done = [(n, found) for n in COUNTS if (found := tiled(closed, n)).did(Tiles)]
    assert done or seed not in FAST
    for n, found in done:
        error = apart(run(found.jaxpr, step.args), wanted)
        assert error <= most, f"{step}; n={n}: off by {error:.1e}, not {most:.1e}"


@pytest.mark.slow
def test_most_steps_have_regions():
    """Else each would be compared with itself."""
    some = [traced(generated(seed)) for seed in SEEDS[::10]]
    found = [any(tiled(closed, n).did(Tiles) for n in COUNTS) for closed in some]
    assert sum(found) >= 0.75 * len(some)
