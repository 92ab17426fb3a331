"""The first layers of scans recompute more than the others, which recompute some."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxmem.cost.equations import flops
from jaxmem.ir import jaxprs, primitives
from jaxmem.scheduling import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.first_layers import FirstLayers
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import lists_in, scans_in, space_of
from tests.scheduling.test_budget import close
from tests.sets import some_fast

L, B, T, H, C = 6, 2, 64, 2, 4  # layers, examples, tokens, heads, channels


def layer(x, w, key):
    """Attention with dropout: what is kept of it is worth more or less per byte."""
    q, k, v = jnp.einsum("btd,cdhe->cbthe", x, w)
    p = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", q, k), -1)
    mask = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, p.shape)
    heads = jnp.einsum("bhst,bthe->bshe", jnp.where(mask, p / 0.9, 0.0), v)
    return x + jnp.tanh(heads.reshape(x.shape))


@pytest.fixture(scope="module")
def problem():
    """(loss gradient, arguments, neighbours on the front of what they may keep)."""

    def loss(ws, x, keys):
        step = lambda x, t: (layer(x, *t), None)
        return jnp.sum(jax.lax.scan(step, x, (ws, keys))[0] ** 3)

    ws, x = (jax.random.key(seed) for seed in (0, 1))
    ws = jax.random.normal(ws, (L, 3, H * C, H, C)) / (H * C) ** 0.5
    keys = jax.random.key_data(jax.random.split(jax.random.key(2), L))
    args = ws, jax.random.normal(x, (B, T, H * C)), keys
    fn = jax.grad(loss)
    first = rewrite(jax.make_jaxpr(fn)(*args), {}, None, Choice("cpu"))
    front = pareto_front(space_of(scans_in(first), lists_in(first), "cpu"))
    front = [one for one in front if not one.choice.get(Recompute).once]
    found = list(itertools.pairwise(front))
    assert len(found) > 2
    return fn, args, found


def made(fn, args, *configs):
    closed = jax.make_jaxpr(fn)(*args)
    return rewrite(closed, {}, None, Choice("cpu", configs))


def rate(candidate):
    return candidate.choice.get(Recompute).rate


@pytest.mark.parametrize("layers", some_fast((1, 4), 4))
def test_values_between_two_that_recompute(problem, layers):
    fn, args, neighbours = problem
    for rich, poor in neighbours:
        first = FirstLayers(rate(poor), layers / L, rate(rich))
        found = made(fn, args, first)
        assert {row.times for row in found.description.recomputed} <= {L, layers}
        close(fn, found.jaxpr, args)


def test_between_two_is_recomputed_what_the_layers_of_each_recompute(problem):
    """What all layers recompute the first ones do not recompute a second time."""
    fn, args, neighbours = problem
    work = lambda found: sum(row.flops for row in found.description.recomputed)
    seen = 0
    for rich, poor in neighbours:
        both = [work(made(fn, args, Recompute(rate(one)))) for one in (rich, poor)]
        found = made(fn, args, FirstLayers(rate(poor), 0.5, rate(rich)))
        assert work(found) == pytest.approx(sum(both) / 2)
        seen += 0 < both[0] < both[1]
        # so counts the jaxpr, where the branch that takes longer counts in all layers
        plain = sum(map(flops, jax.make_jaxpr(fn)(*args).eqns))
        again = sum(map(flops, jaxprs.split(found.jaxpr)[0].eqns)) - plain
        assert again == pytest.approx(both[1])
    assert seen  # both recompute products


def test_what_all_layers_recompute_of_what_all_keep_is_in_no_cond(problem):
    """What a `cond` hands out is written, and read once more."""
    fn, args, neighbours = problem
    seen = 0
    for rich, poor in neighbours:
        found = made(fn, args, FirstLayers(rate(poor), 0.5, rate(rich)))
        eqns = jaxprs.walk(found.jaxpr)
        (cond,) = (eqn for eqn in eqns if eqn.primitive.name == "cond")
        others, _ = map(jaxprs.walk, jaxprs.bodies(cond))
        assert not any(map(primitives.is_dot, others))
        both = made(fn, args, Recompute(rate(rich))).description.recomputed
        seen += any(row.flops for row in both)
    assert seen  # all layers recompute products


def test_a_rate_of_the_first_layers_at_which_nothing_more_is_recomputed(problem):
    """The others still recompute what they were asked to."""
    fn, args, neighbours = problem
    poor = neighbours[-1][1]
    found = made(fn, args, FirstLayers(rate(poor), 0.5, rate(poor)))
    want = made(fn, args, Recompute(rate(poor)))
    assert found.description.recomputed == want.description.recomputed
    close(fn, found.jaxpr, args)
