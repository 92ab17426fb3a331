"""Micro-batches of steps that XLA partitions: values, and what the devices send."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jaxmem import schedule
from jaxmem.ir import jaxprs
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.batch_loop import is_batch_loop
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from jaxmem.scheduling.tiling.tiles import Tiles
from tests.scheduling.tiling.roundings import longest
from tests.scheduling.tiling.test_sharded_tiles import (
    EACH,
    TOKENS,
    WIDTH,
    after,
    arguments,
    assert_same,
    mesh_of,
    normal,
    pinned,
    sent,
    step_of,
)
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")


def rewritten(step, args, *configs):
    """The step with nothing kept of the layers."""
    choice = Choice("h100", (Recompute(1e-3), *configs))
    found = schedule(step, donate_argnums=()).rewritten(choice, *args)
    tree = jax.tree.structure(jax.eval_shape(step, *args))

    def run(*args):
        leaves = jaxprs.evaluate(found.jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(tree, leaves)

    return jax.jit(run), found


CASES = [
    (way, n, tiles)
    for way in ("data", "FSDP", "FSDP and tensor parallel")
    for n in (2, 4)
    for tiles in (False, True)
]


@pytest.mark.parametrize("case", some_fast(CASES, ("FSDP", 2, False)), ids=str)
def test_values_and_no_new_collective(case):
    way, n, tiles = case
    step, args = step_of(pinned(mesh_of(way))), arguments(way, mesh_of(way))
    others = (Tiles(limit=0, n=EACH // n),) if tiles and n < EACH else ()
    whole, _ = rewritten(step, args)
    run, found = rewritten(step, args, MicroBatches(n), *others)
    (loop,) = (e for e in jaxprs.walk(found.jaxpr) if is_batch_loop(e))
    assert loop.params["length"] == n and found.did(Tiles) == bool(others)
    closed = jaxprs.trace(functools.partial(after, step), *args).jaxpr
    assert_same(after(jax.jit(step), *args), after(run, *args), longest(closed))
    before, now = sent(whole, args), sent(run, args)
    # what tensor parallelism sends of the tokens is sent part by part
    assert not now.pop("in tiles") or "tensor" in way
    assert all(now[kind] <= before[kind] for kind in {*before, *now}), (before, now)


def unpinned(way: str, n: int):
    """A step without constraints, as it is and in parts."""
    step, args = step_of(lambda x: x), arguments(way, mesh_of(way))
    return step, args, *rewritten(step, args, MicroBatches(n))


@pytest.mark.parametrize("n", some_fast((2, 4), 4))
@pytest.mark.slow
def test_without_a_constraint_on_activations(n):
    """Random bits, numbers of examples, and weights are those of the whole step."""
    step, args, run, found = unpinned("data", n)
    assert found.did(MicroBatches)
    closed = jaxprs.trace(functools.partial(after, step), *args).jaxpr
    assert_same(after(jax.jit(step), *args), after(run, *args), longest(closed))
    before, now = sent(jax.jit(step), args), sent(run, args)
    assert all(now[kind] <= before[kind] for kind in {*before, *now}), (before, now)


def test_a_dropout_mask_is_that_of_the_whole_step():
    """A device draws the bits of its own examples."""

    def noisy(params, x):
        keep = jax.random.bernoulli(jax.random.key(0), 0.5, x.shape)
        loss = lambda w: jnp.square(jnp.where(keep, x, 0) @ w).mean()
        value, grad = jax.value_and_grad(loss)(params)
        return params - 0.5 * grad, value

    mesh = mesh_of("data")
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    args = put(normal(WIDTH, WIDTH), P()), put(normal(32, TOKENS, WIDTH), P("data"))
    run, found = rewritten(noisy, args, MicroBatches(4))
    assert found.did(MicroBatches)
    closed = jaxprs.trace(noisy, *args).jaxpr
    assert_same(jax.jit(noisy)(*args), run(*args), longest(closed))
    before, now = sent(jax.jit(noisy), args), sent(run, args)
    assert all(now[kind] <= before[kind] for kind in {*before, *now}), (before, now)


def test_no_more_parts_than_a_device_has_examples():
    step, args, _, found = unpinned("data", 2 * EACH)
    assert not found.did(MicroBatches)
    (note,) = [note for note in found.notes if "micro-batches" in note]
    assert f"no argument has an axis that n={2 * EACH} divides" in note


def test_examples_that_go_to_other_devices_stay_whole():
    """A part is made on the devices of its shard; experts are on others."""
    auto = (jax.sharding.AxisType.Auto,) * 2
    mesh = jax.make_mesh((4, 2), ("data", "expert"), auto)
    spread = lambda *spec: NamedSharding(mesh, P(*spec))
    to_experts = lambda x: jax.lax.with_sharding_constraint(x, spread("expert", "data"))

    def step(params, x):
        def loss(w):
            given = to_experts(jnp.einsum("bd,de->ebd", x, w))
            return jnp.square(jnp.tanh(given)).mean()

        return params - jax.grad(loss)(params), None

    x = jax.device_put(normal(32, WIDTH), spread(("data", "expert")))
    args = jax.device_put(normal(WIDTH, 2), spread()), x
    _, found = rewritten(step, args, MicroBatches(2))
    assert not found.did(MicroBatches)
    (note,) = [note for note in found.notes if "micro-batches" in note]
    assert "examples go to other devices in `sharding_constraint` at " in note
