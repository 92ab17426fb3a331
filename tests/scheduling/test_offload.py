"""What scans keep, in the host's memory: values, bytes on the device, the search."""

import itertools
import math
from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem import estimate, microbatch, schedule
from jaxmem.chips import rates_of
from jaxmem.cost.host_traffic import waiting_for_host
from jaxmem.ir import jaxprs
from jaxmem.ir.host_slices import AFFECTED, COPIES
from jaxmem.ir.scans import is_on_host, kept_size, size_of, ys_of
from jaxmem.memory import CompileError
from jaxmem.optim import LowBit, abstract_state, adam, adama, on_host
from jaxmem.scheduling import BudgetError, Choice, Plan
from jaxmem.scheduling._passes import NO_CHOICE
from jaxmem.scheduling.predict.operations import operations_of
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import scans_in, space_in, space_of
from jaxmem.scheduling.recompute.to_host import in_order
from tests.memory.test_estimate import needs_h100
from tests.memory.test_wrong_slices import offloaded
from tests.scheduling.test_budget import B, D, F, L, problem, rewritten
from tests.scheduling.test_scan_residuals import same_bits, scans
from tests.sets import some_fast

HOST = 0.8 * 64e9  # bytes a second: what copies reach of the link of an H100


def stacks(closed):
    """(on the device, on the host), of what the forward scan stacks."""
    ys = ys_of(scans(closed)[0])
    return [v for v in ys if not is_on_host(v)], [v for v in ys if is_on_host(v)]


@pytest.mark.fast("1-None", "1-10000000000.0")
@pytest.mark.parametrize(
    "rate", some_fast([None, float("inf"), 1e10, 1e-3], None, 1e10)
)
@pytest.mark.parametrize("least", [1, 4 * B * D + 1])
def test_gives_the_same_from_the_host(rate, least):
    fn, args = problem()
    made = rewritten(fn, args, Choice("h100", (Recompute(rate, offload=least),)))
    same_bits(jax.make_jaxpr(fn)(*args), made.jaxpr, jax.tree.leaves(args))
    here, away = stacks(made.jaxpr)
    assert all(size_of(v) < L * least for v in here)
    sizes = [v.aval.size * v.aval.dtype.itemsize for v in away]
    assert sum(sizes) == made.description.offloaded_bytes
    assert all(size >= L * least for size in sizes)
    if least == 1:
        assert away and not here


@pytest.mark.parametrize("reverse", [False, True])
def test_layers_that_run_from_either_end(reverse):
    """The layer that is fetched ahead is the next of the backward scan."""

    def loss(ws, x):
        layer = lambda x, w: (x + jnp.sin(x @ w) @ w.T, None)
        return jnp.sum(jax.lax.scan(layer, x, ws, reverse=reverse)[0] ** 3)

    fn, keys = jax.grad(loss), jax.random.split(jax.random.key(0))
    args = jax.random.normal(keys[0], (5, 8, 8)), jax.random.normal(keys[1], (4, 8))
    made = rewritten(fn, args, Choice("h100", (Recompute(offload=1),)))
    assert made.description.offloaded_bytes
    same_bits(jax.make_jaxpr(fn)(*args), made.jaxpr, args)


def test_a_mask_goes_there_in_bits():
    fn, args = problem()
    away = stacks(rewritten(fn, args, Choice("h100", (Recompute(offload=1),))).jaxpr)[1]
    assert L * B * F // 8 in [v.aval.size for v in away if v.aval.dtype == jnp.uint8]
    assert all(v.aval.dtype != bool for v in away)


def test_is_not_counted_on_the_device():
    fn, args = problem()
    graph = {
        least: operations_of(
            rewritten(fn, args, Choice("h100", (Recompute(offload=least),))).jaxpr
        ).graph
        for least in (1, None)
    }
    # a layer's input, and what its curve is made of; but for a layer that comes and
    # one that is there, in either pass
    kept = 4 * (L - 4) * B * (D + F)
    total = {least: sum(v.bytes for v in g.values) for least, g in graph.items()}
    assert total[None] - total[1] >= kept


def test_the_front_goes_on_where_recomputing_is_slower():
    fn, (ws, _, keys) = problem()
    # of so many rows that kernels take longer than to be started
    args = ws, jax.ShapeDtypeStruct((2**14, D), jnp.float32), keys
    first = rewritten(fn, args, NO_CHOICE)
    candidates = pareto_front(
        space_of(scans_in(first), [(first.jaxpr, None)], "h100", offload=math.inf)
    )
    away = [r for r in candidates if r.choice.get(Recompute).offload is not None]
    assert away[-1] == candidates[-1]
    assert candidates[-1].bytes < min(r.bytes for r in candidates if r not in away) / 8
    by_seconds = sorted(candidates, key=lambda one: one.seconds)
    assert by_seconds == candidates  # none keeps more than another that is as fast
    assert all(a.bytes > b.bytes for a, b in itertools.pairwise(candidates))


@pytest.mark.parametrize("width", [512, 32])
def test_what_is_sent_costs_what_layers_do_not_hide(width):
    ws = jax.ShapeDtypeStruct((L, width, width), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((2**16, width), jnp.bfloat16)
    step = jax.grad(lambda ws, x: jnp.sum(jnp.sin(layers(ws, x))))
    first = schedule(step, donate_argnums=()).rewritten(Choice("h100"), ws, x)
    candidates = pareto_front(space_in(first, offload=math.inf))
    kept = [c for c in candidates if c.choice.get(Recompute).offload is None]
    away = [c for c in candidates if c not in kept][-1]
    moved = kept[-1].bytes - away.bytes
    waited = away.seconds - kept[-1].seconds
    assert 0 < waited < 2 * moved / HOST  # there and back, one after the other


def test_the_front_sends_no_more_than_the_host_may_hold():
    fn, args = problem()
    first = rewritten(fn, args, NO_CHOICE)
    most = L * 4 * B * D  # one array of each layer
    found = pareto_front(space_in(first, offload=most))
    away = [c.choice for c in found if c.choice.get(Recompute).offload is not None]
    sent = [rewritten(fn, args, c).description.offloaded_bytes for c in away]
    assert sent and 0 < max(sent) <= most


def test_only_so_many_bytes_of_a_layer_are_sent():
    fn, args = problem()
    config = Recompute(offload=1, offload_most=4 * B * D)
    made = rewritten(fn, args, Choice("h100", (config,)))
    same_bits(jax.make_jaxpr(fn)(*args), made.jaxpr, jax.tree.leaves(args))
    assert 0 < made.description.offloaded_bytes <= L * 4 * B * D
    here, away = stacks(made.jaxpr)
    assert here and away


def layers(ws, x):
    """Layers whose inputs are most of what full recomputation keeps."""
    step = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None)
    return jnp.sum(jax.lax.scan(step, x, ws)[0].astype(jnp.float32) ** 2)


@pytest.mark.slow
def test_fits_a_budget_that_no_recomputation_reaches():
    step = jax.grad(layers)
    args = (
        jax.ShapeDtypeStruct((24, 256, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16),
    )
    inputs = 24 * 8192 * 256 * 2  # of all layers
    room = inputs * 2 // 3
    # all layers can run on some rows at a time, which keeps the inputs of fewer rows
    how = {"target": "h100", "donate_argnums": (), "tile": False}
    with pytest.raises(BudgetError, match="cannot be reached"):
        schedule(step, room, **how).plan(*args)
    plan = schedule(step, room, **how, offload=True).plan(*args)
    assert plan.scheduled.peak_bytes <= room
    assert plan.choice.get(Recompute).offload is not None
    assert plan.offloaded_bytes == inputs
    assert (
        schedule(step, room, **how, offload=True, host_budget=inputs)
        .plan(*args)
        .offloaded_bytes
        == inputs
    )
    with pytest.raises(BudgetError, match="cannot be reached"):
        how |= {"offload": True, "host_budget": inputs // 8}
        schedule(step, room, **how).plan(*args)
    assert f"{inputs / 2**20:.1f} MiB of residuals in host memory" in str(plan)
    loaded = Plan.from_json(plan.to_json())
    assert loaded.choice == plan.choice


def test_rows_from_the_host_are_sharded_as_the_forward_pass_has_them():
    """Else XLA may spread them as a weight, and gather the gradient they multiply."""
    mesh = jaxmem.target_mesh("tpu-v5e", (8,), ("x",))
    spread = lambda *spec: NamedSharding(mesh, P(*spec))
    args = (
        jax.ShapeDtypeStruct((L, 256, 256), jnp.float32, sharding=spread(None, "x")),
        jax.ShapeDtypeStruct((4096, 256), jnp.float32, sharding=spread("x")),
    )
    made = schedule(jax.grad(layers), donate_argnums=())
    made = made.rewritten(Choice("tpu-v5e", (Recompute(offload=1),)), *args)
    (body,) = (jaxprs.bodies(e)[0] for e in scans(made.jaxpr) if e.params["reverse"])
    eqns = list(jaxprs.walk(body))
    back = [e.outvars[0] for e in eqns if e.primitive.name == "device_put"]
    held = {e.invars[0]: e for e in eqns if e.primitive.name == "sharding_constraint"}
    assert back
    for v in back:
        assert held[v].params["sharding"].spec[0] == "x"


def test_a_tpu_sends_the_largest_and_a_gpu_what_has_most_to_run_beside():
    (pair,) = scans_in(rewritten(*problem(), NO_CHOICE))
    found = {*pair.slots.values()}
    chips = "h100", "tpu-v5e"
    first, large = (in_order(pair, found, chip).variables for chip in chips)
    assert first != large and {*first} == {*large} == found
    sizes = [kept_size(v) for v in large]
    assert sizes == sorted(sizes, reverse=True)
    # of an end of a layer, and so beside its rest or most of the next one
    made = [pair.body.maker.get(v, -1) for v in first]
    assert {min(made), max(made)} & {*made[:2]}


def thirds(ws, x):
    """Layers of three products each, what is kept of the last made at the end."""

    def layer(x, w):
        inner = jnp.sin(jnp.sin(x @ w[0]) @ w[1])
        return x + jnp.sin(inner @ w[2]), None

    return jnp.sum(jax.lax.scan(layer, x, ws)[0].astype(jnp.float32) ** 2)


@pytest.mark.parametrize("reverse", [False, True])
def test_what_is_made_late_is_sent_beside_the_next_layer(reverse):
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)
    args = shape(4, 3, 32, 32), shape(4096, 32)
    flip = lambda ws: ws[::-1] if reverse else ws
    step = jax.grad(lambda ws, x: thirds(flip(ws), x))
    (pair,) = scans_in(rewritten(step, args, NO_CHOICE))
    away = in_order(pair, {*pair.slots.values()}, "h100")
    assert away.later and away.later < {*away.variables}
    early = {*away.variables} - away.later
    middle = max(pair.body.maker.get(v, -1) for v in early)
    assert all(pair.body.maker[v] > middle for v in away.later)
    assert not in_order(pair, {*pair.slots.values()}, "tpu-v5e").later


@needs_h100
def test_no_layer_waits_for_what_it_sends():
    """XLA ends a copy to the host where the layer does, or the place is needed."""
    rows, width = 4096, 16384
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.bfloat16)
    args = shape(4, 3, width, width), shape(rows, width)
    config = Recompute(offload=1, offload_most=2 * 2 * rows * width)
    made = rewritten(jax.grad(thirds), args, Choice("h100", (config,)))
    run = lambda *args: jaxprs.evaluate(made.jaxpr, list(args))
    time = estimate(run, *args, target="h100").time
    assert made.description.offloaded_bytes == 4 * config.offload_most
    assert dict(time.by_bound).get("host", 0.0) < 0.01 * time.seconds


def test_offload_needs_a_budget():
    with pytest.raises(ValueError, match="offload=True: needs a budget"):
        schedule(jax.grad(layers), offload=True)
    with pytest.raises(ValueError, match="host_budget='1GiB': needs offload=True"):
        schedule(jax.grad(layers), "1GiB", host_budget="1GiB")
    with pytest.raises(ValueError, match="host_budget=0: must be more than 0 bytes"):
        schedule(jax.grad(layers), "1GiB", offload=True, host_budget=0)


# -- with optimizer state in the host's memory


SIZE, ITERATIONS = 2**18, 8  # of a layer's parameters, and of what is dear in it


def front_of(tx, rows):
    """What the search for H100 can choose from, and the seconds that a step waits."""
    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.float32)

    def dear(x, a):
        """Slower to recompute than to send away, and without residuals of its own."""
        step = lambda x, _: (jnp.tanh(x @ a), None)
        return jax.lax.stop_gradient(jax.lax.scan(step, x, length=ITERATIONS)[0])

    def loss(ws, x, a):
        def layer(x, w):
            return jnp.sin(x @ a) * dear(x, a) * jnp.tanh(jnp.sum(w)), None

        return jnp.sum(jax.lax.scan(layer, x, ws)[0])

    def step(state, x, a):
        ws, opt_state = state
        updates, opt_state = tx.update(jax.grad(loss)(ws, x, a), opt_state, ws)
        return optax.apply_updates(ws, updates), opt_state

    ws = shape(L, SIZE)
    scheduled = schedule(step, donate_argnums=0)
    args = (ws, abstract_state(tx, ws)), shape(rows, F), shape(F, F)
    first = scheduled.rewritten(Choice("h100"), *args)
    waiting = waiting_for_host(first.unordered, rates_of("h100"))
    return waiting, pareto_front(space_in(first, offload=math.inf, waiting=waiting))


def test_what_is_recomputed_while_the_link_is_busy_costs_nothing():
    """Moments fill the link: less is sent away, and more recomputed, than without."""
    waiting, free = front_of(adama(1e-3), rows=128)
    assert waiting == 0
    waiting, busy = front_of(on_host(adama(1e-3)), rows=128)
    moved = 4 * L * SIZE * 4  # two moments of float32, there and back
    assert 0.5 * moved / HOST < waiting < moved / HOST
    sent = lambda front: [c for c in front if c.choice.get(Recompute).offload]
    kept = lambda front: min(c.bytes for c in front if c not in sent(front))
    assert kept(busy) < kept(free)
    # what is recomputed takes the seconds in which the step waits anyway
    assert next(c for c in busy if c.bytes == kept(busy)).seconds <= 0


def test_a_link_that_is_not_full_changes_nothing():
    """Layers that compute for longer than their moments take to come and go."""
    waiting, front = front_of(on_host(adama(1e-3)), rows=2**22)
    assert waiting == 0
    assert front == front_of(adama(1e-3), rows=2**22)[1]


# -- where slices are taken from, in modules for a GPU


def updated(tx, ws, state, x):
    updates, state = tx.update(jax.grad(layers)(ws, x), state, ws)
    return optax.apply_updates(ws, updates), state


def of_policy():
    """A gradient whose residuals a policy of JAX's sends away."""
    step, args = offloaded()
    return schedule(step, donate_argnums=()), args


def of_offload():
    """All that a scan keeps is sent away."""
    args = shape(L, 256, 256), shape(4096, 256)
    made = schedule(jax.grad(layers), donate_argnums=())
    made = made.rewritten(Choice("h100", (Recompute(offload=1),)), *args)
    return lambda *args: jaxprs.evaluate(made.jaxpr, args), args


def of_moments(donated=(0, 1)):
    tx, ws = on_host(adama(1e-3)), shape(L, 256, 256)
    step = schedule(partial(updated, tx), donate_argnums=donated)
    return step, (ws, abstract_state(tx, ws), shape(4096, 256))


def of_table(ws, x, *_):
    return jnp.sum(jnp.tanh(x @ ws.T))


def of_micro_batches():
    tx, ws = adama(1e-3, bits=LowBit(8, on_host=True)), shape(16384, 256)
    args = ws, abstract_state(tx, ws), shape(64, 256), None
    return microbatch(of_table, tx, 2), args


def of_rows():
    """Without `schedule`: of an optimizer alone, some rows of a table at a time."""
    tx, ws = adam(1e-3, bits=32, on_host=True), shape(16384, 256)

    def step(ws, state, x):
        updates, state = tx.update(jax.grad(of_table)(ws, x), state, ws)
        return optax.apply_updates(ws, updates), state

    return step, (ws, abstract_state(tx, ws), shape(64, 256))


STEPS = {
    "policy": of_policy,
    "offload": of_offload,
    "moments": of_moments,
    "moments, not donated": partial(of_moments, ()),
    "rows": of_rows,
    "rows, micro-batches": of_micro_batches,
}


def shape(*sizes):
    return jax.ShapeDtypeStruct(sizes, jnp.float32)


@needs_h100
@pytest.mark.slow
@pytest.mark.parametrize("target", ["h100", "a100"])
@pytest.mark.parametrize("name", STEPS)
def test_a_gpu_takes_every_slice_where_its_index_says(name, target):
    step, args = STEPS[name]()
    report = estimate(step, *args, target=target)
    assert report.host_bytes > 0
    assert not report.wrong_slices


@needs_h100
@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
@pytest.mark.skipif(not AFFECTED, reason="XLA of this version takes them rightly")
def test_which_of_them_were_wrong(name, monkeypatch):
    """Without hidden indices; those that are not donated go over the link whole."""
    monkeypatch.setattr("jaxmem.ir.host_slices.AFFECTED", False)
    step, args = STEPS[name]()
    report = estimate(step, *args, target="h100")
    assert bool(report.wrong_slices) == (name != "moments, not donated")


@needs_h100
@pytest.mark.slow
@pytest.mark.skipif(not AFFECTED, reason="XLA of this version takes them rightly")
def test_a_search_hands_out_no_module_that_is_wrong(monkeypatch):
    monkeypatch.setattr("jaxmem.ir.host_slices.AFFECTED", False)
    step, args = offloaded()
    with pytest.raises(CompileError, match="WRONG VALUES.*where its index says"):
        schedule(step, target="h100", donate_argnums=()).plan(*args)
    with pytest.raises(BudgetError, match="cannot be reached: WRONG VALUES"):
        schedule(step, "1GiB", target="h100", donate_argnums=()).plan(*args)
    kernels = {"xla_disable_hlo_passes": COPIES}
    how = {"target": "h100", "donate_argnums": (), "compiler_options": kernels}
    assert schedule(step, **how).plan(*args).scheduled.host_bytes > 0
