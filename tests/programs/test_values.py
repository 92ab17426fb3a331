"""Programs that are scheduled do what they did."""

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest

import jaxmem
from tests.programs import PROGRAMS
from tests.scheduling.problem import assert_close, copy
from tests.sets import slow_unless

pytestmark = [
    pytest.mark.usefixtures("standard_jax"),
    pytest.mark.filterwarnings("ignore:Some donated buffers were not usable"),
]

# Long to compile, and in the slow suite; each kind of model is among the others too.
LONG = {
    *("adapters", "adversarial", "autoencoder", "diffusion", "language_model"),
    *("meta_learning", "neural_ode", "patches", "policy", "private_descent"),
    *("radiance_field", "recurrent", "simulator", "state_space", "two_views"),
}
CASES = [
    pytest.param(p, marks=slow_unless(p.name not in LONG), id=str(p)) for p in PROGRAMS
]
STEPS = 3
# In float64 a sum of a thousand terms in another order is off by some 1e-14 of it. Adam
# and its like divide by the root of a second moment, which here is at least 1e-4 of the
# largest of its array where it is not 0: 1e4 times that.
RTOL = 1e-10


def wide(args):
    """The arguments in float64: Flax makes parameters in float32 by itself.

    Where they are wide already, what is narrow is an optimizer's own choice.
    """
    if any(x.dtype == jnp.float64 for x in arrays(args[0])):
        return args

    def widened(x):
        narrow = eqx.is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
        return x.astype(jnp.float64) if narrow else x

    return jax.tree.map(widened, args)


def arrays(tree):
    return jax.tree.leaves(eqx.filter(tree, eqx.is_array))


def run(step, state, *batch):
    """The state after some steps on one batch, and what they reported."""
    state, reports = copy(state), []
    for _ in range(STEPS):
        state, report = step(state, *batch)
        reports.append(copy(report))
    return eqx.filter((state, reports), eqx.is_array)


@pytest.mark.parametrize("program", CASES)
def test_scheduled_steps_have_the_values_of_plain_ones(program):
    with jax.enable_x64(True):
        step, args, donated = program.make("small")
        args = wide(args)
        plain = step if hasattr(step, "lower") else jax.jit(step)
        scheduled = jaxmem.schedule(step, donate_argnums=donated)
        assert_close(run(scheduled, *args), run(plain, *args), RTOL)
