"""Seconds of tiles, by a roofline: where they are free, and what they cost beyond."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem.chips import rates_of
from jaxmem.ir.placements import SUM, Placements, Shard, at
from jaxmem.scheduling.tiling.price import seconds
from jaxmem.scheduling.tiling.regions import Region

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


@pytest.mark.parametrize(
    "target, rows, free, dear",
    [("h100", 1180, 1280, 1152), ("tpu-v5e", 962, 1040, 928)],
)
def test_the_sum_of_a_head_is_free_above_the_break_even(target, rows, free, dear):
    """2 rows D V flops take as long as the 8 D V bytes of the sum they are added to."""
    # A tile's operands are read besides: 2 rows (D + V) bytes, 7 per cent of its time.
    machine, n = rates_of(target), 8
    assert 8 / machine.bandwidth == pytest.approx(2 * rows / machine.narrow, rel=1e-3)

    def price(tile):
        left, right = (n * tile, WIDTH), (n * tile, VOCABULARY)
        weights = product(((0,), (0,)), left, right, wide="float32")
        return cost(weights, (0, 0), (None,), n, target) / n

    size = WIDTH * VOCABULARY
    time = 2 * free * size / machine.narrow
    assert price(free) == pytest.approx(0.0, abs=1e-9 * time)
    moved = 8 * size + 2 * dear * (WIDTH + VOCABULARY)
    longer = moved / machine.bandwidth - 2 * dear * size / machine.narrow
    assert price(dear) == pytest.approx(longer) and longer > 0.02 * time


def test_weights_are_read_by_every_tile():
    """2 rows D V flops against 2 D V bytes: free above 295 rows on an H100."""
    logits = product(((1,), (0,)), (ROWS, WIDTH), (WIDTH, VOCABULARY))
    own = lambda rows: cost(logits, (0, None), (0,), ROWS // rows)
    assert own(2048) == pytest.approx(0.0, abs=1e-9)
    n, machine = ROWS // 128, rates_of("h100")
    moved = 2 * (WIDTH * VOCABULARY + 128 * (WIDTH + VOCABULARY))
    longer = moved / machine.bandwidth - 256 * WIDTH * VOCABULARY / machine.narrow
    assert own(128) == pytest.approx(n * longer)


def test_starts_count_where_they_take_longer_than_the_kernels():
    """A product and the loop itself are queued by each tile."""
    tiny = product(((1,), (0,)), (256, 8), (8, 8))
    assert cost(tiny, (0, None), (0,), 16) == pytest.approx(
        (16 * 2 - 1) * rates_of("h100").launch
    )


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
    assert seconds(eqns, region, "h100") == pytest.approx(sums)
    fused = Region(n=4, placed={0: both[0]})
    launch = rates_of("h100").launch
    assert seconds(eqns, fused, "h100") == pytest.approx(4 * launch)


def test_a_loop_in_a_region_counts_its_operations_and_what_it_reads():
    def fn(x, w):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, w)[0]

    x, w = SDS((2**16, 512), jnp.bfloat16), SDS((8, 512, 512), jnp.bfloat16)
    (eqn,) = jax.make_jaxpr(fn)(x, w).eqns
    machine, n, rows = rates_of("h100"), 2, 2**16
    work = 8 * 2 * rows * 512 * 512 / machine.narrow
    time = lambda rows: (8 * 512 * 512 + 2 * rows * 512) * 2 / machine.bandwidth
    assert time(rows / n) < work / n  # its products take longest: the loop is free
    price = cost([eqn], (0, None), (0,), n)
    assert price == pytest.approx(0.0, abs=1e-9 * work)
    n = 2**9
    assert time(rows / n) > work / n  # then its weights
    price = cost([eqn], (0, None), (0,), n)
    most = max(time(rows / n), 2 * rates_of("h100").launch)
    assert price == pytest.approx(n * most - work)
