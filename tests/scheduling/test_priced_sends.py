"""What devices send to recompute something is a part of its price."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.chips import rates_of
from jaxmem.cost.kernel import Product
from jaxmem.cost.roofline import product_seconds
from jaxmem.ir import jaxprs
from jaxmem.ir.communication import sent
from jaxmem.ir.shards import of_shardings
from jaxmem.scheduling.recompute.first_layers import (
    FirstLayers,
    RecomputeFirstLayers,
    rewrites,
    seconds_of_gathers,
)
from jaxmem.scheduling.recompute.minimum_cut import PricedBy, price_at
from jaxmem.scheduling.recompute.pairs import cut, pairs

SIZE, ROWS, LAYERS = 256, 2**17, 4
RATE = 1e12  # bytes a second: a product takes less than to keep its result


def loss(w, x):
    """Two products a layer; the terms of the second one lie on several devices."""

    def layer(x, w):
        columns, rows = w
        return jnp.tanh(jnp.tanh(x @ columns) @ rows) + x, None

    return jnp.sum(lax.scan(layer, x, w)[0] ** 2)


@pytest.fixture
def places():
    mesh = jaxmem.target_mesh("h100", (4, 2), ("data", "model"))
    specs = P(None, None, "model"), P(None, "model", None), P("data")
    return [NamedSharding(mesh, spec) for spec in specs]


@pytest.fixture
def closed():
    w = jax.ShapeDtypeStruct((LAYERS, SIZE, SIZE), jnp.float32)
    x = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32)
    return jaxprs.trace(jax.grad(loss), (w, w), x).jaxpr


def products(pair) -> list[int]:
    names = [e.primitive.name for e in pair.body.eqns]
    return [i for i, name in enumerate(names) if name == "dot_general"]


def test_a_product_that_is_summed_over_devices_is_kept(closed, places):
    price = price_at(RATE, "h100")
    (alone,) = pairs(closed)
    first, second = products(alone)
    assert {first, second} <= {*cut(alone, price).recomputed}
    (spread,) = pairs(closed, of_shardings(closed, places))
    assert second not in cut(spread, price).recomputed


def test_the_price_of_a_sum_over_devices(closed, places):
    """A ring of two: each sends half of what it has of the result, twice."""
    (pair,) = pairs(closed, of_shardings(closed, places))
    first, second = (pair.body.eqns[i] for i in products(pair))
    own = 4 * SIZE * ROWS // 4
    assert [sent(e, pair.inside()) for e in (first, second)] == [0, own]
    rates = rates_of("h100")

    def wanted(columns, summed):
        """Of a device's rows: a fourth of them."""
        one = Product(1, ROWS // 4, columns, summed, 32, "float32", library=True)
        written = 4 * (ROWS // 4) * columns / rates.bandwidth
        return max(product_seconds(one, rates), written) + rates.launch + rates.fill

    price = pair.priced(price_at(RATE, "h100"))
    assert price(first) == pytest.approx(RATE * wanted(SIZE // 2, SIZE), rel=1e-12)
    # half of what is summed, and all of what comes of it: the sum is on both of two
    both = wanted(SIZE, SIZE // 2) + own / rates.link
    assert price(second) == pytest.approx(RATE * both, rel=1e-12)
    # at no price is what has to be sent recomputed
    assert pair.priced(price_at(None, "h100"))(second) is None


def fsdp_places(shape=(4, 2)):
    """Weights over the axis of the examples, and over the columns or the rows."""
    mesh = jaxmem.target_mesh("h100", shape, ("data", "model"))
    specs = P(None, "data", "model"), P(None, "model", "data"), P("data")
    return [NamedSharding(mesh, spec) for spec in specs]


def test_weights_that_are_gathered_for_a_product(closed, places):
    """Not where they are cut along what is cut, or summed, of the result."""
    (pair,) = pairs(closed, of_shardings(closed, places))
    eqns = [pair.body.eqns[i] for i in products(pair)]
    assert [pair.gathered(e) for e in eqns] == [[], []]
    (pair,) = pairs(closed, of_shardings(closed, fsdp_places()))
    part = SIZE * SIZE * 4 / 8
    for i in products(pair):
        ((v, size),) = pair.gathered(pair.body.eqns[i])
        assert v is pair.body.eqns[i].invars[1]
        assert size == 3 * part


def test_what_first_layers_gather_again_is_a_part_of_their_price(closed):
    """Products in a `cond` have weights of their own."""
    found = list(pairs(closed, of_shardings(closed, fsdp_places((8, 1)))))
    config = FirstLayers(RATE, 0.5, None)
    (rewrite,) = rewrites(found, config, "h100")
    assert rewrite.layers == LAYERS // 2 and rewrite.beyond
    part = SIZE * SIZE * 4 / 8
    again = [e for e, *_ in rewrite.gathered]
    assert [e.primitive.name for e in again] == ["dot_general"] * len(again)
    wanted = sum(7 * part * times for *_, times in rewrite.gathered)
    assert wanted and {times for *_, times in rewrite.gathered} == {LAYERS // 2}
    cost = seconds_of_gathers(found, config, "h100")
    assert cost == pytest.approx(wanted / rates_of("h100").link)
    rows = RecomputeFirstLayers().describe(rewrite, "h100").recomputed
    gathers = [row for row in rows if row.operation == "all_gather"]
    assert sum(row.seconds for row in gathers) == pytest.approx(cost)
    (alone,) = rewrites(pairs(closed), config, "h100")
    assert not list(alone.gathered)


def test_a_cut_keeps_the_fewest_bytes_of_one_device():
    """A copy on each device is larger than its product with rows that are sharded."""

    def loss(w, x):
        def layer(total, w):
            square = jnp.cosh(w)
            return total + jnp.sum(jnp.sin(x @ square)), None

        return lax.scan(layer, 0.0, w)[0]

    def price(eqn):  # a product is cheap, and what is made of a weight dear
        if eqn.primitive.name in ("cosh", "sinh"):
            return None
        return 1.0 if eqn.primitive.name == "dot_general" else 0.0

    side = 128
    shapes = (LAYERS, side, side), (2 * side, side)
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    closed = jaxprs.trace(jax.grad(loss), *args).jaxpr
    mesh = jaxmem.target_mesh("h100", (8,), ("data",))
    places = [NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))]
    spread = of_shardings(closed, places)

    def kept(given):
        (pair,) = pairs(closed, given)
        found = cut(pair, PricedBy(price))
        assert found.bytes == pair.kept_on_device(found.variables)
        return {v.aval.shape for v in found.variables}

    copy, rows = (side, side), (2 * side, side)
    assert rows not in kept(None) and copy in kept(None)
    assert rows in kept(spread)


def test_rows_of_a_table_that_each_device_has_are_dear_to_take_once_more():
    """An eighth of the rows is kept for less than the whole table is read for."""
    rows, width, share = 2**18, 64, 0.3  # of the time in which a byte is moved

    def loss(x, table, ids):
        taken = lambda x, ids: (x * jnp.sin(table[ids]), None)
        return jnp.sum(lax.scan(taken, x, ids)[0])

    like = jax.ShapeDtypeStruct
    x = table = like((rows, width), jnp.float32)
    ids = like((LAYERS, rows), jnp.int32)
    closed = jaxprs.trace(jax.grad(loss), x, table, ids).jaxpr
    mesh = jaxmem.target_mesh("h100", (8,), ("data",))
    specs = P("data"), P(), P(None, "data")
    given = of_shardings(closed, [NamedSharding(mesh, spec) for spec in specs])
    price = price_at(share * rates_of("h100").bandwidth, "h100")

    def taken_again(given):
        (pair,) = pairs(closed, given)
        eqns = (pair.body.eqns[i].primitive.name for i in cut(pair, price).recomputed)
        return "gather" in eqns

    assert taken_again(None)
    assert not taken_again(given)
