"""Seconds of tiles, by a roofline: of what, and what they cost beyond the whole.

Bytes, rows, columns and sums are counted here; what such a product takes is the
roofline's (`tests/memory/time`).
"""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.chips import rates_of
from jaxmem.cost import roofline
from jaxmem.cost.kernel import Product
from jaxmem.cost.live_bytes import LiveBytes
from jaxmem.ir.placements import SUM, Placements, Shard, at
from jaxmem.scheduling.tiling.price import RegionBytes, seconds
from jaxmem.scheduling.tiling.regions import Region, RegionGraph, find

SDS = jax.ShapeDtypeStruct
WIDTH, VOCABULARY, ROWS = 4096, 131_072, 2**17


def product(contract, left, right, dtype=jnp.bfloat16, wide=None):
    """The equations of one product."""

    def fn(a, b):
        numbers = (contract, ((), ()))
        return jax.lax.dot_general(a, b, numbers, preferred_element_type=wide)

    return jax.make_jaxpr(fn)(SDS(left, dtype), SDS(right, dtype)).eqns


def cost(eqns, ins, outs, n, target="h100"):
    placed = Placements(tuple(map(at, ins)), tuple(map(at, outs)))
    region = Region(n=n, placed={0: placed})
    return seconds(eqns, region, target)


def tiles_of(m, n, k, target="h100"):
    """What the tiles of a library's product in bfloat16 take."""
    one = Product(1, m, n, k, 16, "bfloat16", library=True)
    return roofline.product_seconds(one, rates_of(target))


def start(target="h100"):
    """Of a product."""
    return rates_of(target).launch + rates_of(target).fill


@pytest.mark.parametrize(
    "target, rows, hidden, dear",
    [("h100", 1126, 1280, 1024), ("tpu-v5e", 1374, 1536, 1280)],
)
def test_the_sum_of_a_head_is_hidden_above_the_break_even(target, rows, hidden, dear):
    """2 rows D V flops take as long as the 8 D V bytes of the sum they are added to."""
    rates, n = rates_of(target), 8
    assert 8 / rates.bandwidth == pytest.approx(2 * rows / rates.narrow, rel=1e-3)
    products = lambda tile: tiles_of(WIDTH, VOCABULARY, tile, target)
    moved = lambda tile: 8 * WIDTH * VOCABULARY + 2 * tile * (WIDTH + VOCABULARY)
    written = lambda tile: moved(tile) / rates.bandwidth

    def price(tile):
        left, right = (n * tile, WIDTH), (n * tile, VOCABULARY)
        weights = product(((0,), (0,)), left, right, wide="float32")
        return cost(weights, (0, 0), (None,), n, target)

    def wanted(tile, longest):
        whole = products(n * tile) + start(target)
        return n * (longest(tile) + start(target) + rates.launch) - whole

    assert products(hidden) > written(hidden) and products(dear) < written(dear)
    assert price(hidden) == pytest.approx(wanted(hidden, products), rel=1e-9)
    assert price(dear) == pytest.approx(wanted(dear, written), rel=1e-9)
    # what is left is what starts the tiles' sums, and the kernels
    assert price(hidden) < 0.04 * products(n * hidden)
    assert price(dear) > 0.08 * products(n * dear)


def test_weights_are_read_by_every_tile():
    """2 rows D V flops against 2 D V bytes: hidden above 282 rows on an H100."""
    logits = product(((1,), (0,)), (ROWS, WIDTH), (WIDTH, VOCABULARY))
    rates = rates_of("h100")
    assert rates.narrow / rates.bandwidth == pytest.approx(282, rel=2e-3)
    whole = tiles_of(ROWS, VOCABULARY, WIDTH) + start()

    def price(rows, longest):
        n = ROWS // rows
        wanted = n * (longest + start() + rates.launch) - whole
        assert cost(logits, (0, None), (0,), n) == pytest.approx(wanted, rel=1e-9)
        return wanted

    assert price(2048, tiles_of(2048, VOCABULARY, WIDTH)) < 0.01 * whole
    moved = 2 * (WIDTH * VOCABULARY + 128 * (WIDTH + VOCABULARY))
    assert price(128, moved / rates.bandwidth) > whole


def test_a_tile_starts_its_kernels_and_leaves_processors_without_work():
    """256 rows take no longer than 16 do: one wave of tiles, nearly empty."""
    tiny = product(((1,), (0,)), (256, 8), (8, 8))
    one, launch = tiles_of(16, 8, 8), rates_of("h100").launch
    assert one == tiles_of(256, 8, 8)
    wanted = 16 * (one + start() + launch) - (one + start())
    assert cost(tiny, (0, None), (0,), 16) == pytest.approx(wanted, rel=1e-9)


def test_what_is_fused_costs_nothing_and_a_reduction_its_sums():
    def fn(x):
        return jnp.sum(jnp.exp(x), 0)

    eqns = jax.make_jaxpr(fn)(SDS((2**12, 2**16), jnp.float32)).eqns
    names = [e.primitive.name for e in eqns]
    assert names == ["exp", "reduce_sum"]
    first = (Shard(0),)
    both = {0: Placements(first, first), 1: Placements(first, (SUM,))}
    region = Region(n=4, placed=both)
    # of each tile the sum is read and written, where the whole writes it once
    sums = (4 * 2 - 1) * 4 * 2**16 / rates_of("h100").bandwidth
    # and each is an iteration with a kernel
    launch = rates_of("h100").launch
    wanted = sums + (4 * 2 - 1) * launch
    assert seconds(eqns, region, "h100") == pytest.approx(wanted, rel=1e-9)
    fused = Region(n=4, placed={0: both[0]})
    assert seconds(eqns, fused, "h100") == pytest.approx(4 * launch)


def test_a_loop_in_a_region_counts_its_operations_and_what_it_reads():
    def fn(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    rows, side = 2**16, 4096
    x, w = SDS((rows, side), jnp.bfloat16), SDS((8, side, side), jnp.bfloat16)
    (eqn,) = jax.make_jaxpr(fn)(x, w).eqns
    rates = rates_of("h100")
    work, starts = 8 * tiles_of(rows, side, side), 8 * start()
    whole = work + starts + rates.launch
    weights = lambda n: (8 * side**2 + 2 * rows // n * side) * 2 / rates.bandwidth

    def price(n, longest):
        wanted = n * (longest + 2 * rates.launch) - whole
        assert cost([eqn], (0, None), (0,), n) == pytest.approx(wanted, rel=1e-9)

    # its products take longest, and each part starts all of them
    assert weights(2) < work / 2
    price(2, work / 2 + starts)
    # then its weights
    assert weights(2**9) > work / 2**9 + starts
    price(2**9, weights(2**9))
    # and where both are small, the starts
    x, w = SDS((256, 8), jnp.bfloat16), SDS((8, 8, 8), jnp.bfloat16)
    (eqn,) = jax.make_jaxpr(fn)(x, w).eqns
    work = 8 * tiles_of(256, 8, 8)
    whole = work + starts + rates.launch
    price(16, work / 16 + starts)


def test_what_parts_write_for_others_has_bytes():
    """Scaled scores are fused into what reads them; parts of a maximum write them."""

    def softmax_sum(q, k, v):
        scores = 0.5 * (q @ k.T)
        most = scores.max(-1, keepdims=True)
        return jnp.exp(scores - most) @ v

    q, k = SDS((64, 8), jnp.float32), SDS((256, 8), jnp.float32)
    closed = jax.make_jaxpr(softmax_sum)(q, k, k)
    graph = RegionGraph(closed)
    live = LiveBytes(graph)
    named = {e.primitive.name: i for i, e in enumerate(graph.eqns)}
    over_keys = find(graph, graph.eqns[named["reduce_max"]].invars[0], 1, 4)
    # the maximum is there once it is whole: what is behind it is no part of the region
    assert named["reduce_max"] in over_keys.eqns
    assert named["exp"] not in over_keys.eqns
    (scores,) = (v for v in graph.eqns[named["reduce_max"]].invars)
    assert scores not in live.sizes
    figures = RegionBytes.of(live, over_keys).in_parts(over_keys.n)
    assert figures.after >= graph.size(scores)
    # over queries nothing is written but what comes out
    over_queries = find(graph, scores, 0, 4)
    assert named["exp"] in over_queries.eqns
    figures = RegionBytes.of(live, over_queries).in_parts(over_queries.n)
    assert figures.after < graph.size(scores)
