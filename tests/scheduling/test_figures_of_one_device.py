"""What a plan counts besides peaks: the same on each of eight devices as on one."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.chips import CHIPS
from jaxmem.ir import jaxprs
from jaxmem.ir.host_traffic import host_traffic, waiting_for_host
from jaxmem.ir.shards import InputSpreads, of_spec, whole
from jaxmem.scheduling import schedule
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.plan.plan import undonated
from jaxmem.scheduling.recompute.residuals import Recompute

N, LAYERS, TOKENS, WIDTH = 8, 3, 64, 64
MACHINE = CHIPS["h100"].machine


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
    """Half of the state is spread, half is on each device."""
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
    own = host_traffic(traced.jaxpr, InputSpreads(mesh, (over, whole(y))))
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
    alone = waiting_for_host(traced(16), MACHINE)
    (x, w) = traced(16 * N).jaxpr.invars
    given = InputSpreads(mesh, (of_spec(NamedSharding(mesh, P("data")), x), whole(w)))
    assert alone > 0
    assert waiting_for_host(traced(16 * N), MACHINE, given) == pytest.approx(alone)


def test_notes(mesh):
    weights, x = arguments(2 * N, mesh)
    size = 4 * (LAYERS * WIDTH**2 + 2 * TOKENS * WIDTH)
    assert jaxmem.memory.format_bytes(size) in undonated((weights, x))
