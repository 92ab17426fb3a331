"""What lies between two corners of the front: one operation more or less recomputed."""

import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxmem.ir.scans import size_of, ys_of
from jaxmem.scheduling import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.recompute.first_layers import FirstLayers, in_some_layers
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import scans_in, space_of
from tests.scheduling.test_budget import close
from tests.scheduling.test_scan_residuals import same_bits, scans

L, ROWS, WIDTH = 3, 64, 16
OUT = {"wide": (1, 8), "middle": (2, 4), "narrow": (4, 1)}  # features in and out


def layer(x, ws):
    """Three products of which the widest is the cheapest for its bytes."""
    total = x
    for (name, (times, _)), w in zip(OUT.items(), ws, strict=True):
        with jax.named_scope(name):
            made = jnp.sin(jnp.tile(x, (1, times)) @ w)
        total += jnp.cos(made.reshape(*x.shape, -1)).sum(-1)
    return total, None


def problem():
    def loss(ws, x):
        return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 3)

    *keys, last = jax.random.split(jax.random.key(0), 4)
    sizes = ((a * WIDTH, b * WIDTH) for a, b in OUT.values())
    pairs = zip(keys, sizes, strict=True)
    ws = tuple(jax.random.normal(key, (L, *size)) / 8 for key, size in pairs)
    return jax.grad(loss), (ws, jax.random.normal(last, (ROWS, WIDTH)))


def made(*configs):
    fn, args = problem()
    return rewrite(jax.make_jaxpr(fn)(*args), {}, None, Choice("cpu", configs))


@pytest.fixture(scope="module")
def front():
    found = pareto_front(space_of(scans_in(made()), (), "cpu"))
    assert any(one.choice.get(Recompute).once for one in found)
    return found


def test_values_and_kept_bytes(front):
    """To the bit, and as many bytes as the candidate says."""
    fn, args = problem()
    want, leaves = jax.make_jaxpr(fn)(*args), jax.tree.leaves(args)
    for one in front:
        found = made(one.choice.get(Recompute))
        same_bits(want, found.jaxpr, leaves)
        assert sum(map(size_of, ys_of(scans(found.jaxpr)[0]))) == one.bytes


def test_an_operation_that_is_done_once_is_not_recomputed(front):
    for config in (one.choice.get(Recompute) for one in front):
        again = [row.path for row in made(config).description.recomputed]
        done = {label.split()[0].split("/")[-1] for label in config.once}
        assert not done & {path.split("/")[-1] for path in again}


def test_the_front_has_no_candidate_that_another_is_better_than(front):
    for rich, poor in itertools.pairwise(front):
        assert rich.bytes > poor.bytes and rich.seconds < poor.seconds
    once = [bool(one.choice.get(Recompute).once) for one in front]
    assert 0 < sum(once) < len(front) - 1  # and corners on either side of them
    assert not once[0] and not once[-1]


def test_layers_are_parted_where_the_first_do_all_that_the_others_do(front):
    """Also where either does an operation once that its rate would recompute."""
    fn, args = problem()
    work = lambda found: sum(row.flops for row in found.description.recomputed)
    seen = set()
    for rich, poor in itertools.combinations(front, 2):
        own = [made(one.choice.get(Recompute)) for one in (rich, poor)]
        paths = [{row.path for row in one.description.recomputed} for one in own]
        between = in_some_layers(rich, poor, L)
        if between is None:
            continue
        first = between.first(1).choice.get(FirstLayers)
        found, (few, many) = made(first), map(work, own)
        assert paths[0] <= paths[1]
        assert work(found) == pytest.approx(few + (many - few) / L)
        close(fn, found.jaxpr, args)
        seen |= {(bool(first.once), bool(first.others_once))}
    assert {(False, True), (False, False)} <= seen
