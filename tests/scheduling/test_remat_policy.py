"""The choice for a budget as names for `jax.checkpoint`."""

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.scheduling import BudgetError, RematPolicy
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.residuals import Recompute
from tests.scheduling.test_budget import close
from tests.scheduling.test_scan_residuals import stacked

L, B, D, F = 6, 32, 16, 64


def layer(x, w):
    up = checkpoint_name(x @ w[0], "up")
    down = checkpoint_name(jnp.tanh(up) @ w[1], "down")
    return x + jnp.sin(down), None


def step_with(policy):
    """The step with its layers in `jax.checkpoint`, or with them as they are."""
    one = layer if policy is None else jax.checkpoint(layer, policy=policy)
    loss = lambda ws, x: jnp.sum(jax.lax.scan(one, x, ws)[0] ** 2)
    return jax.grad(loss)


ARGS = (jnp.ones((L, D, F)) / 8, jnp.ones((L, F, D)) / 8), jnp.ones((B, D)) / 3


@pytest.mark.parametrize("rate", [None, 1e-3])
def test_only_named_values_are_kept(rate):
    """As `jax.checkpoint` does with the same names: the carry, and what is named."""
    fn = step_with(None)
    closed = jax.make_jaxpr(fn)(*ARGS)
    made = rewrite(closed, {}, None, Choice("h100", (Recompute(rate, named=True),)))
    names = ("up", "down") if rate is None else ()
    policy = jax.checkpoint_policies.save_only_these_names(*names)
    same = jax.make_jaxpr(step_with(policy))(*ARGS)
    assert sorted(stacked(made.jaxpr)) == sorted(stacked(same))
    close(fn, made.jaxpr, ARGS)


def test_a_budget_without_limit_keeps_every_name():
    policy = jaxmem.remat_policy(step_with(None), "1GiB", *ARGS)
    assert policy == RematPolicy(("down", "up"), ())
    assert policy.report.peak_bytes <= 2**30
    with_it, without = (
        stacked(jax.make_jaxpr(step_with(p))(*ARGS))
        for p in (policy, jax.checkpoint_policies.nothing_saveable)
    )
    assert sum(with_it) == sum(without) + 4 * L * B * (F + D)


def test_bad_input():
    plain = jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w)))
    with pytest.raises(ValueError, match="no value of its scanned layers has a name"):
        jaxmem.remat_policy(plain, "1GiB", ARGS[0][0][0], ARGS[1])
    with pytest.raises(BudgetError, match="the lowest peak is"):
        jaxmem.remat_policy(step_with(None), "1KiB", *ARGS)
