"""Operations on the terms of a sum: what is linear adds up, all else is refused."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem.ir import jaxprs
from jaxmem.ir.placements import REPLICATE, SUM, Partial, Shard
from jaxmem.ir.placements.bodies import NotInParts
from jaxmem.scheduling.tiling.loops import placements_of
from jaxmem.scheduling.tiling.part_values import of_block
from jaxmem.scheduling.tiling.shard_parts import Parts

pytestmark = pytest.mark.usefixtures("standard_jax")

PARTS, ROWS, WIDTH = 3, 4, 6
GROWN = ((1, 2, 0), (0, 1, 1))  # a pad: before, behind and between


def whole_numbers(seed: int, *shape: int):
    """Numbers whose sums and products are exact, none of them 0."""
    x = np.random.default_rng(seed).integers(1, 9, shape)
    return jnp.asarray(x, jnp.float32)


W, V = (whole_numbers(i, ROWS, WIDTH) for i in (100, 101))


def some():
    return lax.broadcasted_iota(jnp.int32, (ROWS, WIDTH), 1) % 3 > 0


def put(x, y, i):
    return lax.dynamic_update_slice(x, y[:2, :2], (i, i))


def of_rows(combine):
    numbers = lax.ScatterDimensionNumbers((1,), (0,), (0,))
    at = jnp.array([[2], [0]], jnp.int32)
    return lambda x, y: combine(x, at, y[:2], numbers)


def row(x):
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    at = jnp.array([[2], [0]], jnp.int32)
    return lax.gather(x, at, numbers, (1, WIDTH))


# Of each, a part has a term of the first arguments; the others are whole.
LINEAR = {
    "neg": (lax.neg, 1),
    "cast": (lambda x: lax.convert_element_type(x, jnp.float16), 1),
    "transpose": (lambda x: x.T, 1),
    "reshape": (lambda x: x.reshape(-1), 1),
    "broadcast": (lambda x: jnp.broadcast_to(x, (2, ROWS, WIDTH)), 1),
    "sum": (lambda x: lax.reduce_sum_p.bind(x, axes=(0,), out_sharding=None), 1),
    "slice": (lambda x: lax.slice(x, (1, 0), (3, 4)), 1),
    "rev": (lambda x: lax.rev(x, (1,)), 1),
    "cumsum": (lambda x: lax.cumsum(x, 1), 1),
    "gather": (row, 1),
    "pad with 0": (lambda x: lax.pad(x, 0.0, GROWN), 1),
    "add": (lax.add, 2),
    "add a whole": (lax.add, 1),
    "add 1": (lambda x: lax.add(x, 1.0), 1),
    "add ones": (lambda x: lax.add(x, lax.full((ROWS, WIDTH), 1.0)), 1),
    "add zeros": (lambda x: lax.add(x, lax.full((ROWS, WIDTH), 0.0)), 1),
    "sub": (lax.sub, 2),
    "a whole without it": (lambda x, w: lax.sub(w, x), 1),
    "1 without it": (lambda x: lax.sub(1.0, x), 1),
    "concatenate": (lambda x, w: lax.concatenate([x, w], 0), 2),
    "concatenate a whole": (lambda x, w: lax.concatenate([w, x], 0), 1),
    "times a whole": (lax.mul, 1),
    "a whole times it": (lambda x, w: lax.mul(w, x), 1),
    "times 3": (lambda x: lax.mul(x, 3.0), 1),
    "by 4": (lambda x: lax.div(x, 4.0), 1),
    "product": (lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), 1),
    "product on the right": (
        lambda x, w: lax.dot_general(w, x, (((1,), (1,)), ((), ()))),
        1,
    ),
    "select": (lambda x, w: lax.select_n(some(), w, x), 1),
    "select both": (lambda x, w: lax.select_n(some(), w, x), 2),
    "put into": (lambda x, w: put(x, w, 1), 1),
    "put": (lambda x, w: put(w, x, 1), 1),
    "put both": (lambda x, w: put(x, w, 1), 2),
    "scatter onto": (of_rows(lax.scatter_add), 1),
    "scatter": (lambda x, w: of_rows(lax.scatter_add)(w, x), 1),
    "scatter both": (of_rows(lax.scatter_add), 2),
}
OTHER = {
    "pad with 1": (lambda x: lax.pad(x, 1.0, GROWN), 1),
    "pad with what is known later": (lambda x, w: lax.pad(x, w[0, 0], GROWN), 1),
    "pad by a term": (lambda x, w: lax.pad(w, x[0, 0], GROWN), 1),
    "product of two": (lax.mul, 2),
    "its square": (lambda x: lax.mul(x, x), 1),
    "dot of two": (lambda x, w: lax.dot_general(x, w, (((1,), (1,)), ((), ()))), 2),
    "dot with itself": (lambda x: lax.dot_general(x, x, (((1,), (1,)), ((), ()))), 1),
    "a whole by it": (lambda x, w: lax.div(w, x), 1),
    "quotient": (lax.div, 2),
    "square": (lax.square, 1),
    "exp": (lambda x: lax.exp(x), 1),
    "max": (lax.max, 1),
    "greatest": (lambda x: lax.reduce_max_p.bind(x, axes=(0,), out_sharding=None), 1),
    "product of all": (lambda x: lax.cumprod(x, 1), 1),
    "sorted": (lambda x: lax.sort(x, dimension=0), 1),
    "integers": (lambda x: lax.convert_element_type(x, jnp.int32), 1),
    "sign": (lambda x: lax.gt(x, 9.0), 1),
    "scatter times": (of_rows(lax.scatter_mul), 2),
    "scatter max": (of_rows(lax.scatter_max), 2),
    "which": (lambda x, w: lax.select_n(x > 9, w, w), 1),
}  # fmt: skip


def equation(name: str):
    """A call of the function, its arguments and, of the first of them, the terms."""
    fn, count = (LINEAR | OTHER)[name]
    wholes = [W, V][: len(inspect.signature(fn).parameters)]
    (eqn,) = jax.make_jaxpr(jax.jit(fn))(*wholes).eqns
    terms = [
        [whole_numbers(10 * k + j, ROWS, WIDTH) for j in range(PARTS)]
        for k in range(count)
    ]
    return eqn, [*map(sum, terms), *wholes[count:]], terms


def treatment_of(eqn, terms):
    states = [SUM] * len(terms) + [REPLICATE] * (len(eqn.invars) - len(terms))
    return placements_of(
        eqn, states, [REPLICATE] * len(eqn.outvars), Parts(PARTS)
    ), states


@pytest.mark.parametrize("name", LINEAR)
def test_what_is_linear_is_done_on_each_term(name):
    eqn, args, terms = equation(name)
    found, states = treatment_of(eqn, terms)
    assert found is not None and set(found.outs) == {SUM}
    assert states[: len(terms)] == [SUM] * len(terms)
    given = dict(zip(eqn.invars, args, strict=True))
    total = 0
    for part, own in enumerate(zip(*terms, strict=True)):
        env = {(v, SUM): x for v, x in zip(eqn.invars, own, strict=False)}
        values = of_block(PARTS, jnp.int32(part), given.__getitem__, env=env)
        total += values.outputs(eqn, found)[0]
    (want,) = jaxprs.rebind(eqn, args, jaxprs.bodies(eqn))
    np.testing.assert_array_equal(total, want)  # all are small whole numbers


@pytest.mark.parametrize("name", OTHER)
def test_what_is_not_linear_needs_the_sum(name):
    eqn, _, terms = equation(name)
    with pytest.raises(NotInParts, match="the sum over all examples"):
        treatment_of(eqn, terms)


def test_what_is_combined_otherwise_needs_all():
    eqn, _, _ = equation("neg")
    with pytest.raises(NotInParts, match="what all examples give"):
        placements_of(eqn, [Partial("max")], [REPLICATE], Parts(PARTS))


def test_what_is_whole_stays_whole_where_it_is_not_cut():
    """What the asked axis would need is no obstacle: each part does all of it."""
    summed = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])(W)
    ordered = jax.make_jaxpr(lambda x: lax.sort(x, dimension=0))(W)
    for closed, why in ((summed, "sums over devices"), (ordered, "the whole axis")):
        (eqn,) = closed.eqns
        assert placements_of(eqn, [REPLICATE], [Shard(0)], Parts(2)) is None
        with pytest.raises(NotInParts, match=why):
            placements_of(eqn, [Shard(0)], [REPLICATE], Parts(2))


def test_a_barrier_has_what_was_cut_or_is_asked_cut():
    barrier = lambda *xs: lax.optimization_barrier(xs)
    (eqn,) = jax.make_jaxpr(barrier)(W, V, W + V).eqns
    whole, kept = REPLICATE, (Shard(0), Shard(1), REPLICATE)
    found = placements_of(
        eqn, [kept[0], whole, whole], [whole, kept[1], whole], Parts(2)
    )
    assert found is not None and found.ins == found.outs == kept
    found = placements_of(eqn, [SUM, whole, SUM], [whole] * 3, Parts(2))
    assert found is not None and found.ins == found.outs == (SUM, whole, SUM)


def test_what_is_cut_is_cut_as_it_comes_and_else_as_it_is_asked():
    eqn, _, _ = equation("neg")
    (neg,) = jaxprs.split(jaxprs.bodies(eqn)[0])[0].eqns
    whole, one, other = REPLICATE, Shard(0), Shard(1)
    cases = (one, other, one), (whole, other, other), (other, whole, other)
    for given, asked, placed in cases:
        found = placements_of(neg, [given], [asked], Parts(2))
        assert found is not None and found.ins == found.outs == (placed,)
    assert placements_of(neg, [whole], [whole], Parts(2)) is None
    (summed,) = jax.make_jaxpr(LINEAR["sum"][0])(W).eqns
    found = placements_of(summed, [one], [whole], Parts(2))
    assert found is not None and (found.ins, found.outs) == ((one,), (SUM,))
