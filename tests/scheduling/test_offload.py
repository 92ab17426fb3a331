"""What scans keep, in the host's memory: values, bytes on the device, the search."""

import jax
import jax.numpy as jnp
import pytest

from jaxmem import schedule
from jaxmem.ir.scans import is_on_host, size_of, ys_of
from jaxmem.scheduling import BudgetError, Choice, Plan
from jaxmem.scheduling._passes import NO_CHOICE
from jaxmem.scheduling.predict.operations import operations_of
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.search.front import pareto_front, space_of
from tests.scheduling.test_budget import B, D, F, L, problem, rewritten
from tests.scheduling.test_scan_residuals import same_bits, scans


def stacks(closed):
    """(on the device, on the host), of what the forward scan stacks."""
    ys = ys_of(scans(closed)[0])
    return [v for v in ys if not is_on_host(v)], [v for v in ys if is_on_host(v)]


@pytest.mark.parametrize("rate", [None, float("inf"), 1e10, 1e-3])
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
    kept = 4 * L * B * (D + F)  # a layer's input, and what its curve is made of
    total = {least: sum(v.bytes for v in g.values) for least, g in graph.items()}
    assert total[None] - total[1] >= kept


def test_the_front_goes_on_where_recomputing_is_slower():
    fn, args = problem()
    first = rewritten(fn, args, NO_CHOICE)
    candidates = pareto_front(
        space_of(first.pairs, [first.jaxpr], "h100", offload=True)
    )
    assert candidates[-1].bytes == 0
    away = [r for r in candidates if r.choice.get(Recompute).offload is not None]
    assert away == candidates[-len(away) :]
    last = candidates[-len(away) - 1]  # the last that keeps all it has on the device
    assert {r.choice.get(Recompute).rate for r in away} == {32e9}
    assert last.choice.get(Recompute).rate == 32e9
    for candidate in away:  # 64 GB/s, there and back
        moved = last.bytes - candidate.bytes
        assert candidate.seconds == pytest.approx(last.seconds + 2 * moved / 64e9)


def layers(ws, x):
    """Layers whose inputs are most of what full recomputation keeps."""
    step = lambda x, w: (jnp.tanh(jnp.tanh(x @ w) @ w.T), None)
    return jnp.sum(jax.lax.scan(step, x, ws)[0].astype(jnp.float32) ** 2)


def test_fits_a_budget_that_nothing_else_reaches():
    step = jax.grad(layers)
    args = (
        jax.ShapeDtypeStruct((24, 256, 256), jnp.bfloat16),
        jax.ShapeDtypeStruct((8192, 256), jnp.bfloat16),
    )
    inputs = 24 * 8192 * 256 * 2  # of all layers
    room = inputs * 2 // 3
    with pytest.raises(BudgetError, match="cannot be reached"):
        schedule(step, room, target="h100", donate_argnums=()).plan(*args)
    how = {"target": "h100", "donate_argnums": (), "offload": True}
    plan = schedule(step, room, **how).plan(*args)
    assert plan.scheduled.peak_bytes <= room
    assert plan.choice.get(Recompute).offload is not None
    assert plan.offloaded_bytes == inputs
    assert f"{inputs / 2**20:.1f} MiB of residuals wait in the host's" in str(plan)
    loaded = Plan.from_json(plan.to_json())
    assert loaded.choice == plan.choice


def test_offload_needs_a_budget():
    with pytest.raises(ValueError, match="offload=True: needs a budget"):
        schedule(jax.grad(layers), offload=True)
