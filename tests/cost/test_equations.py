"""Seconds of equations, against bytes and products counted by hand.

What a product takes is the roofline's (`tests/memory/time`), of rows, columns and a sum
that are counted here.
"""

import math
from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem.chips import rates_of
from jaxmem.cost import equations, roofline
from jaxmem.cost.host_traffic import host_traffic, waiting_for_host
from jaxmem.cost.kernel import Product
from jaxmem.ir.fused import fused_only, is_lookup
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shards import WHOLE, of_shardings

TARGET = rates_of("h100")
AT_ONCE = replace(TARGET, bandwidth=math.inf)  # nothing waits for its memory
START = TARGET.launch + TARGET.fill  # of a product
SDS = jax.ShapeDtypeStruct
X, NARROW = SDS((32, 64), jnp.float32), SDS((32, 64), jnp.bfloat16)
BYTES = 4 * 32 * 64


def equation(fn, *args):
    (eqn,) = jax.make_jaxpr(fn)(*args).eqns
    return eqn


def seconds(fn, *args):
    return equations.seconds(equation(fn, *args), TARGET)


def of_product(m, n, k, batch=1, dtype="float32"):
    """What the tiles of a product of a library take."""
    bits = 8 * jnp.dtype(dtype).itemsize
    one = Product(batch, m, n, k, bits, dtype, library=True)
    return roofline.product_seconds(one, TARGET)


MOVED = {
    "what it reads and what it writes": (lambda x: lax.sort(x), (X,), 2 * BYTES),
    "a sum": (lambda x: lax.reduce_sum(x, (1,)), (X,), BYTES + 4 * 32),
    "more than it reads": (
        lambda x, i: lax.gather(
            x,
            i,
            lax.GatherDimensionNumbers((1,), (0,), (0,)),
            (1, 64),
        ),
        (X, SDS((512, 1), jnp.int32)),
        BYTES + 4 * 512 + 512 * 64 * 4,
    ),
    "in its own type": (lambda x: lax.cumsum(x, 0), (NARROW,), BYTES),
    "hashes": (
        lambda key: jax.random.bits(key, (32, 64), jnp.uint32),
        (jax.eval_shape(lambda: jax.random.key(0)),),
        3 * BYTES,
    ),
}
FUSED = {
    "elementwise": lambda x: lax.exp(x),
    "a barrier": lambda x: lax.optimization_barrier(x),
}


@pytest.mark.parametrize("name", MOVED)
def test_a_kernel_is_started_and_its_bytes_take_the_bandwidth(name):
    fn, args, moved = MOVED[name]
    wanted = TARGET.launch + moved / TARGET.bandwidth
    assert seconds(fn, *args) == pytest.approx(wanted, rel=1e-12)


@pytest.mark.parametrize("name", FUSED)
def test_what_is_fused_is_not_even_started(name):
    assert seconds(FUSED[name], X) == 0.0


W = SDS((64, 16), jnp.float32)
IMAGE, KERNEL = SDS((2, 3, 8, 10), jnp.float32), SDS((6, 3, 5, 7), jnp.float32)
# rows, columns and the sum of a product; and how many there are
PRODUCTS = {
    "product": (jnp.dot, (X, W), (32, 16, 64)),
    "batches": (
        lambda x, y: lax.dot_general(x, y, (((2,), (1,)), ((0,), (0,)))),
        (SDS((4, 5, 6), jnp.float32), SDS((4, 6, 7), jnp.float32)),
        (5, 7, 6, 4),
    ),
    "convolution": (
        lambda x, w: lax.conv(x, w, (1, 1), "SAME"),
        (IMAGE, KERNEL),
        (2 * 8 * 10, 6, 3 * 5 * 7),
    ),
    "rows of groups": (
        lax.ragged_dot,
        (X, SDS((5, 64, 16), jnp.float32), SDS((5,), jnp.int32)),
        (32, 16, 64),
    ),
}


@pytest.mark.parametrize("name", PRODUCTS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_products_take_what_their_tiles_take(name, dtype):
    fn, args, sizes = PRODUCTS[name]
    of = lambda a: a.dtype if a.dtype == jnp.int32 else dtype
    eqn = equation(fn, *(SDS(a.shape, of(a)) for a in args))
    assert equations.flops(eqn) == 2 * math.prod(sizes)
    tiles = of_product(*sizes, dtype=dtype)
    assert equations.product_seconds(eqn, TARGET) == tiles > 0
    assert equations.seconds(eqn, AT_ONCE) == tiles + START
    # of few channels: as long as what it makes takes to be written
    (made,) = (v.aval.size * v.aval.dtype.itemsize for v in eqn.outvars)
    written = made / TARGET.bandwidth
    assert equations.seconds(eqn, TARGET) == max(tiles, written) + START


def test_a_product_of_few_channels_takes_as_long_as_to_write_it():
    """2 r^2 flops for each of the r^2 elements of a sum of one."""
    rows = 2**13
    eqn = equation(jnp.dot, SDS((rows, 1), "float32"), SDS((1, rows), "float32"))
    written = 4 * rows**2 / TARGET.bandwidth
    assert written > of_product(rows, rows, 1)
    assert equations.seconds(eqn, TARGET) == pytest.approx(written + START, rel=1e-12)


def test_a_product_of_two_types_is_as_slow_as_the_wider():
    eqn = equation(
        lambda x, w: lax.dot_general(
            x, w, (((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
        ),
        *(NARROW, W),
    )
    assert equations.seconds(eqn, AT_ONCE) == of_product(32, 16, 64) + START
    assert of_product(32, 16, 64) > of_product(32, 16, 64, dtype="bfloat16")


SQUARE = SDS((64, 64), jnp.float32)
FLOPS, ONE = 2 * 64**3, of_product(64, 64, 64)


def twice(x):
    return x @ x @ x


NESTED = {
    "jit": (jax.jit(twice), 2),
    "remat": (jax.checkpoint(twice), 2),
    "scan": (lambda x: lax.scan(lambda c, _: (twice(c), None), x, length=5)[0], 10),
    "scans in scans": (
        lambda x: lax.scan(
            lambda c, _: lax.scan(lambda c, _: (c @ c, None), c, length=3), x, length=5
        )[0],
        15,
    ),
}


@pytest.mark.parametrize("name", NESTED)
def test_bodies_count_as_often_as_they_run(name):
    fn, times = NESTED[name]
    eqn = equation(fn, SQUARE)
    assert equations.flops(eqn) == times * FLOPS
    took = pytest.approx(times * ONE, rel=1e-12)
    assert equations.product_seconds(eqn, TARGET) == took
    took = pytest.approx(times * (ONE + START), rel=1e-12)
    assert equations.seconds(eqn, AT_ONCE) == took


def test_of_branches_the_dearest_counts():
    def fn(i, x):
        return lax.switch(i, [lambda x: x @ x, twice, lambda x: x + 1], x)

    eqn = jax.make_jaxpr(fn)(SDS((), jnp.int32), SQUARE).eqns[-1]
    assert eqn.primitive.name == "cond" and equations.flops(eqn) == 2 * FLOPS
    took = pytest.approx(2 * (ONE + START), rel=1e-12)
    assert equations.seconds(eqn, AT_ONCE) == took


@pytest.fixture(scope="module")
def mesh():
    auto = (jax.sharding.AxisType.Auto,) * 2
    return jax.make_mesh((4, 2), ("data", "model"), auto)


def spread_eqn(fn, mesh, *args):
    """(the equation, how its arrays are spread) of a function of (type, spec) pairs."""
    specs = [
        SDS(x.shape, x.dtype, sharding=NamedSharding(mesh, P(*s))) for x, s in args
    ]
    closed = jax.make_jaxpr(fn)(*specs)
    (eqn,) = closed.eqns
    given = of_shardings(closed, [spec.sharding for spec in specs])
    return eqn, shardings_in(closed, given)


@pytest.mark.parametrize("known", [False, True])
def test_a_shard_map_counts_what_one_device_does(mesh, known):
    run = jax.shard_map(
        lambda x, w: lax.sort(x @ w),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
    )
    eqn, shardings = spread_eqn(run, mesh, (X, ("data",)), (W, ()))
    shardings = shardings if known else WHOLE
    assert equations.flops(eqn, shardings) == 2 * 32 * 64 * 16 / 4
    written = 4 * 32 * 16 / 4 / TARGET.bandwidth
    product = max(of_product(32 // 4, 16, 64), written) + START
    time = pytest.approx(product + 2 * written + TARGET.launch, rel=1e-12)
    assert equations.seconds(eqn, TARGET, shardings) == time


def test_a_device_reads_all_of_what_is_not_spread(mesh):
    """Rows of a table that each device has, for ids that are spread over four."""
    numbers = lax.GatherDimensionNumbers((1,), (0,), (0,))
    fn = lambda x, i: lax.gather(x, i, numbers, (1, 64))
    eqn, shardings = spread_eqn(
        fn, mesh, (X, ()), (SDS((512, 1), jnp.int32), ("data",))
    )
    assert shardings.shards(eqn.outvars[0]) == 4
    moved = BYTES + (4 * 512 + 512 * 64 * 4) / 4
    assert equations.seconds(eqn, TARGET, shardings) == pytest.approx(
        moved / TARGET.bandwidth + TARGET.launch, rel=1e-12
    )


CALLS = {
    "jit": (jax.jit(lambda x, w, v: (jnp.tanh(x @ w), v + 1)), 1),
    "scan": (
        lambda x, w, v: lax.scan(lambda x, _: (jnp.tanh(x @ w), v + 1), x, length=5),
        5,
    ),
    "cond": (
        lambda x, w, v: lax.cond(
            True, lambda x: (jnp.tanh(x @ w), v + 1), lambda x: (x, v), x
        ),
        1,
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_work_in_a_body_is_shared_as_its_own_arrays_are_spread(mesh, name):
    """Not as others are that the body has too: `v` alone is spread over `model`."""
    fn, times = CALLS[name]
    args = (SQUARE, ("data",)), (SQUARE, ()), (SQUARE, ("data", "model"))
    eqn, shardings = spread_eqn(fn, mesh, *args)
    assert shardings.workers(eqn) == 8
    assert equations.flops(eqn, shardings) == times * FLOPS / 4
    one = of_product(64 // 4, 64, 64)
    time = pytest.approx(times * (one + START), rel=1e-12)
    assert equations.seconds(eqn, AT_ONCE, shardings) == time
    time = pytest.approx(times * one, rel=1e-12)
    assert equations.product_seconds(eqn, TARGET, shardings) == time


def test_what_has_no_products_takes_no_time_for_them():
    for fn in (lambda x: lax.sort(x), jax.jit(lambda x: lax.sort(x) + 1)):
        assert equations.product_seconds(equation(fn, X), TARGET) == 0.0
        assert equations.flops(equation(fn, X)) == 0.0


def test_nobody_tells_how_long_a_while_loop_runs():
    while_ = lambda x: lax.while_loop(lambda x: x[0, 0] < 3, lambda x: x @ x, x)
    assert seconds(while_, SQUARE) is None
    assert seconds(jax.jit(lambda x: while_(x) @ x), SQUARE) is None
    printed = jax.jit(lambda x: jax.debug.callback(lambda x: None, x))
    assert seconds(printed, SQUARE) is None
    summed = jax.make_jaxpr(lambda x: lax.psum(x, "i"), axis_env=[("i", 2)])(SQUARE)
    assert equations.seconds(summed.eqns[0], TARGET) is None


def fetched(x):
    return jax.device_put(x, jax.memory.Space.Device)


def sent(x):
    return jax.device_put(x, jax.memory.Space.Host)


def stacked(x):
    """Each iteration sends one array; the products are far quicker."""
    return lax.scan(lambda c, _: (c @ c, sent(c)), x, length=7)


def test_what_goes_to_the_host_and_back_is_counted():
    large = SDS((1024, 1024), jnp.float32)
    both = jax.make_jaxpr(lambda x: fetched(sent(x) + 0))(large)
    own = 4 * 1024**2
    assert host_traffic(both) == 2 * own
    called = jax.make_jaxpr(jax.jit(lambda x: fetched(sent(x) + 0)))(large)
    assert host_traffic(called) == 2 * own
    assert waiting_for_host(called, TARGET) == 0.0  # only scans wait
    stays = jax.make_jaxpr(lambda x: fetched(x) * 2)(large)
    assert host_traffic(stays) == 0
    closed = jax.make_jaxpr(stacked)(large)
    assert host_traffic(closed) == 7 * own
    moved = own / TARGET.bandwidth
    # the array is read, too, by a kernel of its own
    work = max(of_product(1024, 1024, 1024), moved) + START + moved + TARGET.launch
    waits = 7 * (own / TARGET.host - work)
    assert (
        waiting_for_host(closed, TARGET) == pytest.approx(waits, rel=1e-12)
        and waits > 0
    )
    inside = jax.jit(lambda c: (c @ c, sent(c)))
    called = jax.make_jaxpr(lambda x: lax.scan(lambda c, _: inside(c), x, length=7))
    assert waiting_for_host(called(large), TARGET) == pytest.approx(waits, rel=1e-12)
    outer = jax.jit(lambda x: stacked(stacked(x)[0]))
    closed = jax.make_jaxpr(outer)(large)
    assert waiting_for_host(closed, TARGET) == pytest.approx(2 * waits, rel=1e-12)


def test_a_scan_that_computes_longer_than_it_sends_does_not_wait():
    wide = SDS((2048, 2048), jnp.float32)

    def body(c, _):
        for _ in range(64):
            c = c @ c
        return c, sent(c[:1])

    closed = jax.make_jaxpr(lambda x: lax.scan(body, x, length=3))(wide)
    assert host_traffic(closed) == 3 * 4 * 2048
    assert waiting_for_host(closed, TARGET) == 0.0


def test_a_scan_of_which_nobody_knows_the_time_does_not_wait():
    def body(c, _):
        return lax.while_loop(lambda c: c[0, 0] < 3, lambda c: c + 1, c), sent(c)

    closed = jax.make_jaxpr(lambda x: lax.scan(body, x, length=3))(SQUARE)
    assert host_traffic(closed) > 0
    assert waiting_for_host(closed, TARGET) == 0.0


TABLES = {
    "a byte's codes": (256, 4096, True),
    "more than a byte's": (257, 4096, False),
    "less codes than the table": (16, 8, False),
    "as many": (16, 16, True),
}


@pytest.mark.parametrize("name", TABLES)
def test_what_is_a_lookup(name):
    size, codes, wanted = TABLES[name]
    table, at = SDS((size,), jnp.float32), SDS((codes, 1), jnp.int32)
    numbers = lax.GatherDimensionNumbers((), (0,), (0,))
    eqn = equation(lambda x, i: lax.gather(x, i, numbers, (1,)), table, at)
    assert is_lookup(eqn) == wanted
    assert fused_only(eqn) == (0.0 if wanted else None)
    assert fused_only(eqn, sent=1.0) is None
    fused = equation(lambda x: lax.exp(x), X)
    assert fused_only(fused) == 0.0 and not is_lookup(fused)
