"""Scans, branches and calls on one part of the examples."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.ir import jaxprs
from jaxmem.ir.placements import REPLICATE, SUM, Shard, at
from jaxmem.ir.placements.bodies import NotInParts
from jaxmem.scheduling.tiling.loops import placements_of
from jaxmem.scheduling.tiling.part_values import of_block
from jaxmem.scheduling.tiling.shard_parts import Parts

B, D, LAYERS, PARTS = 8, 4, 3, 4


@pytest.fixture(autouse=True)
def as_users_write_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def normal(seed: int, *shape: int):
    return jax.random.normal(jax.random.key(seed), shape)


def only(fn, *args):
    """The one equation of a function."""
    (eqn,) = jax.make_jaxpr(fn)(*args).jaxpr.eqns
    return eqn


def placed(way):
    return way if way == SUM else at(way)


def check(eqn, args, ins, outs):
    """The treatment is as said, and the parts together are the whole."""
    ins, outs = [[*map(placed, side)] for side in (ins, outs)]
    found = placements_of(eqn, ins, [REPLICATE] * len(outs), Parts(PARTS))
    assert found is not None
    assert list(found.outs) == outs
    parts = []
    for part in range(PARTS):
        given = dict(zip(eqn.invars, args, strict=True))
        values = of_block(PARTS, jnp.int32(part), given.__getitem__)
        parts.append(values.outputs(eqn, found))
    closed = jax.make_jaxpr(lambda *xs: jaxprs.rebind(eqn, xs, jaxprs.bodies(eqn)))
    whole = jaxprs.evaluate(closed(*args), args)
    for want, state, *got in zip(whole, outs, *parts, strict=True):
        if state == REPLICATE:
            together = got[0]
        else:
            together = sum(got) if state == SUM else jnp.concatenate(got, state.axis)
        # a sum of B terms of size one in another order
        np.testing.assert_allclose(together, want, atol=B * D * LAYERS * 1.2e-7 * 10)


def forward(x, w):
    return jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w)


def backward(x, w, residuals, shared):
    """Cotangents of the layers; `total` sums over examples and layers."""

    def layer(carry, layer):
        dh, total = carry
        w, h = layer
        return (dh @ w.T * shared, total + (dh * h).sum(0)), h.T @ dh

    init = x, jnp.zeros(D)
    return jax.lax.scan(layer, init, (w, residuals), reverse=True)


def test_a_forward_scan_carries_examples_and_stacks_them():
    args = normal(0, B, D), normal(1, LAYERS, D, D)
    check(only(forward, *args), args, [0, None], [0, 1])


def test_a_backward_scan_sums_the_gradients_of_weights():
    x, w, h = normal(0, B, D), normal(1, LAYERS, D, D), normal(2, LAYERS, B, D)
    eqn = jax.make_jaxpr(backward)(x, w, h, normal(3, D)).jaxpr.eqns[-1]
    args = [normal(3, D), x, jnp.zeros(D), w, h]
    assert [v.aval.shape for v in eqn.invars] == [a.shape for a in args]
    check(eqn, args, [None, 0, None, None, 1], [0, SUM, SUM])


def test_a_mask_that_the_body_makes_whole_is_cut_where_it_is_kept():
    def masked(x, keys):
        def layer(h, key):
            keep = jax.random.bernoulli(key, 0.5, h.shape)
            return jnp.where(keep, h, 0), keep

        return jax.lax.scan(layer, x, keys)

    args = normal(0, B, D), jax.random.split(jax.random.key(1), LAYERS)
    check(only(masked, *args), args, [0, None], [0, 1])


def test_branches_agree_on_what_they_give():
    def either(first, x, w):
        return jax.lax.cond(
            first, lambda x, w: (x @ w, x.sum()), lambda x, w: (x, 0.0), x, w
        )

    args = jnp.array(True), normal(0, B, D), normal(1, D, D)
    eqn = jax.make_jaxpr(either)(*args).jaxpr.eqns[-1]
    check(eqn, [jnp.int32(1), *args[1:]], [None, 0, None], [0, SUM])


def test_scans_in_scans_and_remat():
    def outer(x, w):
        return jax.lax.scan(lambda h, w: jax.checkpoint(forward)(h, w), x, w)

    args = normal(0, B, D), normal(1, 2, LAYERS, D, D)
    check(only(outer, *args), args, [0, None], [0, 2])


def test_a_map_over_the_examples_is_shorter():
    fn = lambda x, w: jax.lax.map(lambda one: jnp.tanh(w @ one), x)
    args = normal(0, B, D), normal(1, D, D)
    check(only(fn, *args), args[::-1], [None, 0], [0])


def test_a_scan_over_the_examples_adds_up():
    """The gradient of a map, and gradients that are accumulated example by example."""

    def accumulated(total, x, w):
        add = lambda total, one: (total + jnp.outer(one, w @ one), one.sum())
        return jax.lax.scan(add, total, x)

    total, x, w = normal(0, D, D), normal(1, B, D), normal(2, D, D)
    eqn = only(accumulated, total, x, w)
    whole, each = REPLICATE, Shard(0)
    found = placements_of(eqn, [whole, whole, each], [whole, whole], Parts(PARTS))
    # the total so far is a term of one part
    assert found is not None and found.ins == (whole, SUM, each)
    check(eqn, [w, total, x], [None, None, 0], [SUM, 0])


@pytest.mark.parametrize(
    ("fn", "args", "ins", "why"),
    [
        (lambda x: jax.lax.scan(lambda c, x: (c + x, c), jnp.zeros(D), x),
         [normal(0, B, D)], [None, 0], "one after another"),
        (lambda x, w: jax.lax.scan(lambda h, w: (h - h.mean(0), w), x, w),
         [normal(0, B, D), normal(1, LAYERS)], [0, None], "`div`|`sub`|`reduce_sum`"),
        (lambda x, w: jax.lax.scan(lambda h, w: (jnp.sort(h, 0), w), x, w),
         [normal(0, B, D), normal(1, LAYERS)], [0, None], "`sort`.*the whole axis"),
        (lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
         [normal(0, B)], [0, 0], "which branch it takes depends on the examples"),
    ],
    ids=["examples in order", "mean", "sort", "branch"],
)  # fmt: skip
def test_what_needs_all_examples_is_named_with_its_line(fn, args, ins, why):
    eqn = jax.make_jaxpr(fn)(*args).jaxpr.eqns[-1]
    with pytest.raises(NotInParts, match=why) as error:
        placements_of(
            eqn, [*map(at, ins)], [REPLICATE] * len(eqn.outvars), Parts(PARTS)
        )
    assert "test_loops.py" in str(error.value)
