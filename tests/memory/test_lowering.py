"""A step that a chip's lowering refuses is refused alike by all that compile it."""

import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem.memory import CompileError
from tests.cli.invoking import invoke
from tests.memory.test_estimate import needs_h100
from tests.memory.test_estimate import own_cache as own_cache

pytestmark = needs_h100

X = jax.ShapeDtypeStruct((8, 8), jnp.float32)
REFUSED = "step cannot be lowered for h100: .*'schur' not found for platform cuda"


def step(w, x):
    """One that has a factorisation which jax has for the CPU alone."""
    return w - 0.1 * jax.scipy.linalg.schur(w)[0], jnp.tanh(x @ w)


def for_cli(batch=8):
    return step, (X, jax.ShapeDtypeStruct((batch, 8), jnp.float32))


def test_what_is_refused_here_compiles_for_the_cpu():
    assert jaxmem.estimate(step, X, X).peak_bytes > 0


HOW = {"target": "h100", "donate_argnums": 0}
PATHS = {
    "estimate": lambda: jaxmem.estimate(step, X, X, **HOW),
    "estimate, full": lambda: jaxmem.estimate(step, X, X, full=True, **HOW),
    "schedule": lambda: jaxmem.schedule(step, progress=False, **HOW).plan(X, X),
    "schedule, budget": lambda: jaxmem.schedule(
        step, "1MiB", progress=False, **HOW
    ).plan(X, X),
    "max_batch": lambda: jaxmem.max_batch(
        step, lambda n: (X, X), progress=False, **HOW
    ),
    "advise": lambda: jaxmem.advise(step, X, X, progress=False, **HOW),
    "lint": lambda: jaxmem.lint(step, X, X, **HOW),
}


@pytest.mark.parametrize("path", PATHS)
def test_every_function_says_why(path):
    with pytest.raises(CompileError, match=REFUSED):
        PATHS[path]()


@pytest.mark.parametrize("command", ["estimate", "plan", "max-batch"])
def test_every_command_says_why(command):
    result = invoke(command, f"{__name__}:for_cli", "--target", "h100")
    assert result.exit_code == 3
    assert "CompileError" in result.stderr and "'schur' not found" in result.stderr
