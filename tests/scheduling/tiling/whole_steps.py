"""Whole steps in float64, as they are and as passes have made them."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem.ir import jaxprs
from jaxmem.scheduling import _passes
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.tiling.batch_loop import is_batch_loop
from tests.scheduling.tiling.roundings import longest

RATE = 0.1


def normal(seed: int, *shape: int):
    return jax.random.normal(jax.random.key(seed), shape, jnp.float64) / 2


def descent(loss: Callable) -> Callable:
    """A step of gradient descent on a loss of parameters and data."""

    def step(params, *data):
        value, grads = jax.value_and_grad(loss)(params, *data)
        return jax.tree.map(lambda w, g: w - RATE * g, params, grads), value

    return step


def rewritten(step, args, *configs, target: str = "cpu") -> _passes.Rewritten:
    """A step that gives new state for its first argument, which is donated."""
    closed = jax.make_jaxpr(step)(*args)
    given = len(jax.tree.leaves(args[0]))
    aliases = {i: i for i in range(given)}
    return _passes.rewrite(closed, aliases, None, Choice(target, configs))


def batch_loops(done: _passes.Rewritten) -> list[Any]:
    return [e for e in jaxprs.split(done.jaxpr)[0].eqns if is_batch_loop(e)]


def check_values(step, args, done: _passes.Rewritten, steps: int = 1) -> None:
    """The rewritten step gives what the step gives, after some steps too.

    As for generated steps (`test_generated`): the largest difference is at most m u of
    the largest number, where m counts the roundings on the longest path through all of
    the steps and u is half of eps.
    """
    tree = jax.tree.structure(jax.eval_shape(step, *args))

    def own(*args):
        outs = jaxprs.evaluate(done.jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(tree, outs)

    def repeated(step):
        def run(state, *data):
            out = None
            for _ in range(steps):
                state, *out = step(state, *data)
            return state, out

        return run

    wanted = jax.tree.leaves(jax.jit(repeated(step))(*args))
    found = jax.tree.leaves(jax.jit(repeated(own))(*args))
    count = longest(jax.make_jaxpr(repeated(step))(*args))
    largest = max(float(np.abs(x).max()) for x in wanted)
    assert np.isfinite(largest)
    most = count * np.finfo(np.float64).eps / 2 * largest
    for x, y in zip(found, wanted, strict=True):
        np.testing.assert_allclose(x, y, rtol=0, atol=most)


def temporaries(closed) -> int:
    """Bytes that a jaxpr takes besides arguments and results, compiled for this CPU."""
    avals = [v.aval for v in jaxprs.split(closed)[0].invars]
    run = jax.jit(lambda *args: jaxprs.evaluate(closed, args))
    return run.lower(*avals).compile().memory_analysis().temp_size_in_bytes
