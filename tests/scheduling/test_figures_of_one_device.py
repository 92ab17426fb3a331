"""What a plan counts besides peaks: the same on each of eight devices as on one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.chips import rates_of
from jaxmem.cost.host_traffic import host_traffic, waiting_for_host
from jaxmem.ir import jaxprs
from jaxmem.ir.scans import LARGE
from jaxmem.ir.shards import InputShardings, of_shardings, of_spec, whole
from jaxmem.memory import format_bytes
from jaxmem.scheduling import schedule
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._pass import Level
from jaxmem.scheduling.moves.inside import Constants, ConstantsInside
from jaxmem.scheduling.order.order_operations import OrderOperations
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.plan.plan import undonated
from jaxmem.scheduling.recompute.barriers import Barriers
from jaxmem.scheduling.recompute.residuals import Recompute

N, LAYERS, TOKENS, WIDTH = 8, 3, 64, 64
RATES = rates_of("h100")


@pytest.fixture(scope="module")
def mesh():
    return jaxmem.target_mesh("h100", (N,), ("data",))


def layer(x, w):
    scores = jax.nn.softmax(jnp.einsum("btd,bsd->bts", x, x @ w), -1)
    return x + jnp.einsum("bts,bsd->btd", scores, x), None


def step(w, x):
    run = lambda w: jnp.square(lax.scan(layer, x, w)[0]).sum()
    return w - 0.1 * jax.grad(run)(w)


def arguments(batch: int, mesh=None):
    put = lambda shape, *spec: jax.ShapeDtypeStruct(
        shape,
        jnp.float32,
        sharding=None if mesh is None else NamedSharding(mesh, P(*spec)),
    )
    return put((LAYERS, WIDTH, WIDTH)), put((batch, TOKENS, WIDTH), "data")


def test_what_is_recomputed(mesh):
    """Results of products, whose writing a search adds to their seconds."""

    def rows(args):
        found = schedule(step, donate_argnums=0, progress=False)
        made = found.rewritten(Choice("h100", (Recompute(1e-3),)), *args)
        figures = ((r.bytes, r.flops, r.times) for r in made.description.recomputed)
        return sorted(row for row in figures if row[1])

    alone, spread = rows(arguments(2)), rows(arguments(2 * N, mesh))
    assert alone == spread and alone
    assert max(size for size, *_ in alone) == 4 * 2 * TOKENS * TOKENS  # the scores


def test_what_goes_to_the_host(mesh):
    """Half of the state is sharded, half is on each device."""
    host = jax.memory.Space.Host

    def step(x, y):
        fetched = jax.device_put(x, jax.memory.Space.Device)
        kept, _ = lax.scan(lambda c, _: (c + 1, None), fetched, length=2)
        return jax.device_put(kept, host), jax.device_put(y + 1, host)

    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    on_host = lambda x: jax.device_put(x, host)
    traced = jaxprs.trace(lambda x, y: step(on_host(x), y), like(N, 64), like(64))
    (x, y) = traced.jaxpr.jaxpr.invars
    over = of_spec(NamedSharding(mesh, P("data")), x)
    own = host_traffic(traced.jaxpr, InputShardings(mesh, (over, whole(y))))
    assert own == 4 * 64 * (3 + 1)
    assert host_traffic(traced.jaxpr) == 4 * 64 * (3 * N + 1)


def test_how_long_scans_wait_for_the_link(mesh):
    def step(x, w):
        def body(x, _):
            kept = jax.device_put(x, jax.memory.Space.Host)
            return x @ w, jax.device_put(kept, jax.memory.Space.Device)

        return lax.scan(body, x, length=LAYERS)

    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    traced = lambda rows: jaxprs.trace(step, like(rows, 64), like(64, 64)).jaxpr
    rows = 2**14  # sent for longer than a product is started
    alone = waiting_for_host(traced(rows), RATES)
    (x, w) = traced(rows * N).jaxpr.invars
    given = InputShardings(mesh, (of_spec(NamedSharding(mesh, P("data")), x), whole(w)))
    assert alone > 0
    assert waiting_for_host(traced(rows * N), RATES, given) == pytest.approx(alone)


def test_notes(mesh):
    weights, x = arguments(2 * N, mesh)
    size = 4 * (LAYERS * WIDTH**2 + 2 * TOKENS * WIDTH)
    assert jaxmem.memory.format_bytes(size) in undonated((weights, x))


# -- sentences and rows, where some arrays are sharded and others are not


def spread_over(mesh, shape, *spec, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def test_a_copy_on_each_device_may_be_larger_than_shards(mesh):
    """What is made of gradients that are sharded is whole on each device.

    In a narrow dtype it takes half of the gradients' bytes on all devices, and four
    times those on one: as long as it is not donated, nothing is gained.
    """

    def step(w, state, x):
        run = lambda w: jnp.square(lax.scan(layer, x, w)[0]).sum()
        gradient = lax.with_sharding_constraint(jax.grad(run)(w), in_shards)
        gradient = gradient.astype(state.dtype)
        return lax.with_sharding_constraint(gradient, everywhere) + state

    in_shards = NamedSharding(mesh, P(None, "data"))
    everywhere = NamedSharding(mesh, P())
    w, x = arguments(2 * N, mesh)
    state = spread_over(mesh, w.shape, dtype=jnp.bfloat16)
    rows = lambda **how: schedule(step, **how).plan(w, state, x).gradients
    (kept,) = rows(donate_argnums=())
    size = 4 * LAYERS * WIDTH**2
    assert (kept.bytes, kept.released) == (size // N, False)
    assert f"would write {format_bytes(size // 2)} beside what" in kept.why
    (updated,) = rows(donate_argnums=1)
    assert updated.released


@pytest.mark.parametrize("side", [1024, 4096])
def test_casts_of_weights(mesh, side):
    """Where the part of a device is large: else a barrier is not worth it."""

    def step(weights, x):
        def loss(weights):
            y = x
            for w in weights:
                y = jnp.tanh(y @ w.astype(y.dtype))
            return jnp.sum(y.astype(jnp.float32))

        return jax.grad(loss)(weights)

    x = spread_over(mesh, (64, side), dtype=jnp.bfloat16)
    weights = [spread_over(mesh, (side, side), "data")] * 3
    found = schedule(step, donate_argnums=(), progress=False)
    made = found.rewritten(Choice("h100", (Barriers(enabled=True),)), weights, x)
    # all but the first layer's, whose weight the backward pass does not read
    size = format_bytes(2 * 2 * side**2 // N)
    note = f"{size} of casts of weights are made in each pass, and not kept"
    assert (note in made.notes) == (2 * side**2 // N >= LARGE)


def test_residuals_that_are_kept(mesh):
    """Without a target: a stack of layers, and one array more of one layer."""

    def notes(args):
        plan = schedule(narrow, donate_argnums=()).plan(*args)
        return [note for note in plan.notes if "residuals are kept" in note]

    def narrow(w, x):
        run = lambda w: jnp.square(
            lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]
        )
        return jax.grad(lambda w: run(w).sum())(w)

    def rows(count: int, mesh=None):
        weights, _ = arguments(1, mesh)
        if mesh is None:
            return weights, jax.ShapeDtypeStruct((count, WIDTH), jnp.float32)
        return weights, spread_over(mesh, (count, WIDTH), "data")

    alone, spread = notes(rows(5)), notes(rows(5 * N, mesh))
    assert alone == spread and len(alone) == 1


def test_what_is_recomputed_in_an_order(mesh):
    """A product that is done a second time for the second of its readers."""

    def step(x, w):
        y = x @ w
        return jnp.cumsum(y, 0), y.sum()

    def rows(count: int, mesh=None):
        args = (count, WIDTH), (WIDTH, WIDTH)
        if mesh is None:
            closed = jaxprs.trace(step, *(jax.ShapeDtypeStruct(a, "f4") for a in args))
            given = None
        else:
            specs = spread_over(mesh, args[0], "data"), spread_over(mesh, args[1])
            closed = jaxprs.trace(step, *specs)
            given = of_shardings(closed.jaxpr, [s.sharding for s in specs])
        level = Level(closed.jaxpr, {}, "h100", shardings=given)
        order = OrderOperations()
        (found,) = order.analyse(level, OperationOrder(sequence=(0, 1, 0, 2)))
        (row,) = order.describe(found, "h100").recomputed
        return row.operation, row.bytes, row.flops, row.seconds

    assert rows(64) == rows(64 * N, mesh)


@pytest.mark.parametrize("side", [1024, 4096])
def test_constants_of_scans(mesh, side):
    """They are made in each iteration where the part of a device is large."""

    def step(x, row):
        wide = jnp.broadcast_to(row[:, None], (side, side))
        return lax.scan(lambda x, _: (jnp.sin(x * wide), None), x, length=LAYERS)[0]

    x, row = spread_over(mesh, (side, side), "data"), spread_over(mesh, (side,), "data")
    closed = jaxprs.trace(step, x, row).jaxpr
    level = Level(
        closed, {}, shardings=of_shardings(closed, (x.sharding, row.sharding))
    )
    found = list(ConstantsInside().analyse(level, Constants()))
    assert bool(found) == (4 * side**2 // N >= LARGE)
    assert list(ConstantsInside().analyse(Level(closed, {}), Constants()))


def test_a_table_of_which_rows_are_updated(mesh):
    def step(table, ids):
        return table - 0.1 * jax.grad(lambda t: jnp.square(t[ids]).sum())(table)

    table = spread_over(mesh, (8 * 1024, 256), "data")
    ids = spread_over(mesh, (16,), dtype=jnp.int32)
    (row,) = schedule(step, donate_argnums=0).plan(table, ids).gradients
    assert row.released and row.bytes == 4 * table.size // N


def test_residuals_between_branches(mesh):
    def step(w, x, flag):
        def loss(w):
            # of other types in each branch: newer jax merges those of one type
            half = x.astype(jnp.bfloat16)
            branch = lambda f, x: (
                lambda w: jnp.sum(jnp.sin(f(x @ w.astype(x.dtype))), dtype=jnp.float32)
            )
            return lax.cond(flag, branch(jnp.tanh, x), branch(jnp.cos, half), w)

        return w - 0.1 * jax.grad(loss)(w)

    def sizes(args):
        found = schedule(step, donate_argnums=0, progress=False)
        made = found.rewritten(Choice("h100"), *args)
        return {abs(r.bytes) for r in made.description.residuals}

    flag = jax.ShapeDtypeStruct((), bool)
    w, x = spread_over(mesh, (WIDTH, WIDTH)), spread_over(mesh, (512, WIDTH), "data")
    assert {4 * x.size // N, 2 * x.size // N} <= sizes((w, x, flag))
