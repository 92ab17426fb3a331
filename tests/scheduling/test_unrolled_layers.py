"""Unrolled layers recomputed by a minimum cut: values, barriers and bytes."""

import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from benchmarks.models import unrolled as models
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, late_of
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.shards import Shardings, of_shardings
from jaxmem.scheduling import Choice
from jaxmem.scheduling._passes import rewrite
from jaxmem.scheduling.order.ordered import OperationOrder
from jaxmem.scheduling.order.reductions import Reductions
from jaxmem.scheduling.predict.operations import operations_of
from jaxmem.scheduling.recompute.bottlenecks import bottlenecks
from jaxmem.scheduling.recompute.front import pareto_front
from jaxmem.scheduling.recompute.gradient_ends import gradient_ends
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.recompute.space import space_of
from jaxmem.scheduling.recompute.unrolled import Unrolled
from jaxmem.scheduling.recompute.unrolled_cut import (
    made_together,
    unrolled,
    unrolled_cut,
    with_layer_inputs,
)
from jaxmem.scheduling.tiling.tiles import Tiles
from jaxmem.scheduling.tiling.vocabulary_tiles import VocabularyTiles

LAYERS, ROWS, WIDTH = 3, 64, 128
RATES = (math.inf, 1e12, 1e-3)


def layer(x, w, key):
    """Attention of a row's halves with dropout, then two products and a curve."""
    q, k, v = (x @ one.astype(x.dtype) for one in w["qkv"])
    p = jax.nn.softmax((q @ k.T).astype(jnp.float32)).astype(x.dtype)
    kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, p.shape)
    x = x + jnp.where(kept, p / 0.9, 0) @ v
    return x + jnp.tanh(x @ w["up"].astype(x.dtype)) @ w["down"].astype(x.dtype)


def loss(ws, x, keys):
    for w, key in zip(ws, keys, strict=True):
        x = layer(x, w, key)
    return jnp.sum(x.astype(jnp.float32) ** 2)


def arguments(dtype=jnp.bfloat16):
    normal = lambda i, *s: jax.random.normal(jax.random.key(i), s) / 10
    ws = [
        {
            "qkv": [normal(9 * i + k, WIDTH, WIDTH) for k in range(3)],
            "up": normal(9 * i + 4, WIDTH, 4 * WIDTH),
            "down": normal(9 * i + 5, 4 * WIDTH, WIDTH),
        }
        for i in range(LAYERS)
    ]
    keys = jax.random.key_data(jax.random.split(jax.random.key(99), LAYERS))
    return ws, normal(100, ROWS, WIDTH).astype(dtype), keys


step = jax.value_and_grad(loss)


def closed():
    return jax.make_jaxpr(step)(*arguments())


def rewritten(*configs):
    return rewrite(closed(), {}, None, Choice("h100", configs))


@pytest.mark.parametrize("inputs", (0, 1, 2))
@pytest.mark.parametrize("reductions", (False, True))
@pytest.mark.parametrize("rate", RATES)
def test_the_same_in_every_form(rate, reductions, inputs):
    """Each operation on its own: to the bit."""
    how = Unrolled(rate, reductions, inputs)
    made = rewritten(Recompute(rate, reductions=reductions), how)
    assert made.did(Unrolled)
    leaves = jax.tree.leaves(arguments())
    got = jaxprs.evaluate(made.jaxpr, leaves)
    want = jaxprs.evaluate(closed(), leaves)
    for g, w in zip(got, want, strict=True):
        np.testing.assert_array_equal(g, w)


def pair_of(step=step, args=None):
    return unrolled(jax.make_jaxpr(step)(*(args or arguments())))


def test_layers_are_told_apart_by_what_all_of_the_step_goes_through():
    graph = JaxprGraph(closed())
    size = lambda v: v.aval.size * v.aval.dtype.itemsize
    found = bottlenecks(graph, late_of(graph), size, ROWS * WIDTH)
    # the input of each half of a layer; of the first, which is an argument, what is
    # made of it
    assert 2 * LAYERS - 1 <= len(found) <= 2 * LAYERS + 1
    assert {v.aval.shape for v in found} == {(ROWS, WIDTH)}


def test_what_is_read_for_long_is_no_input_of_a_layer():
    """A skip connection round everything: no value is the only one."""

    def with_skip(ws, x, keys):
        first = jnp.tanh(x)
        return loss(ws, first, keys) + jnp.sum(first[::2].astype(jnp.float32))

    graph = JaxprGraph(jax.make_jaxpr(jax.grad(with_skip))(*arguments()))
    size = lambda v: v.aval.size * v.aval.dtype.itemsize
    found = bottlenecks(graph, late_of(graph), size, ROWS * WIDTH)
    assert len(found) >= 2 * LAYERS - 1  # it is beside the layers, and hides none


def test_a_layer_is_made_at_once_where_its_input_is_kept():
    pair = with_layer_inputs(pair_of())
    found = unrolled_cut(pair, 1e-3, "h100")
    groups = made_together(pair, found)
    large = [g for g in groups if pair.kept_on_device(g) > ROWS * WIDTH]
    assert len(large) >= LAYERS
    # without them all layers hang together
    whole = pair_of()
    found = unrolled_cut(whole, 1e-3, "h100")
    most = max(map(whole.kept_on_device, made_together(whole, found)))
    assert most > 2 * max(map(pair.kept_on_device, large))


def behind_barriers(jaxpr):
    eqns = jaxprs.split(jaxpr)[0].eqns
    held = [e.invars for e in eqns if primitives.is_barrier(e)]
    return set(itertools.chain.from_iterable(held))


def test_arguments_wait_as_well():
    """XLA merges what is made of them alone with that of the forward pass."""
    made = rewritten(Recompute(1e-3), Unrolled(1e-3, False, True)).jaxpr
    held = behind_barriers(made)
    count = len(jax.tree.leaves(arguments()[0]))
    weights, keys = made.jaxpr.invars[:count], made.jaxpr.invars[-1]
    # the last product's operand is read by the backward pass alone, transposed
    assert len(held & set(weights)) >= count - LAYERS
    assert keys in held


def test_masks_that_are_kept_are_kept_in_bits():
    """A rate at which random bits are not drawn twice; 2^20 elements are a mask."""

    def masked(w, x, key):
        kept = jax.random.bernoulli(jax.random.wrap_key_data(key), 0.9, x.shape)
        return jnp.sum(jnp.where(kept, jnp.tanh(x @ w) / 0.9, 0) ** 2)

    args = jnp.ones((256, 256)) / 16, jnp.ones((4096, 256)), arguments()[2][0]
    step = jax.grad(masked)
    program = jax.make_jaxpr(step)(*args)
    choice = Choice("h100", (Recompute(math.inf), Unrolled(math.inf)))
    made = rewrite(program, {}, None, choice)
    assert made.did(Unrolled)
    packed = [
        e.outvars[0].aval
        for e in jaxprs.split(made.jaxpr)[0].eqns
        if e.outvars[0].aval.dtype == jnp.uint8
    ]
    assert packed and max(a.size for a in packed) * 8 >= 4096 * 256
    got = jaxprs.evaluate(made.jaxpr, jax.tree.leaves(args))
    np.testing.assert_array_equal(got[0], step(*args))


def test_a_tile_makes_its_masks_when_they_are_read():
    """In the body of a tile, equations of the two passes are in any order."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        step, args = models.gradient(None, models.BERT, layers=3)
        program = jax.make_jaxpr(step)(*args)
        unrolled = Recompute(1e12), Unrolled(1e12, True, True)
        choice = Choice("h100", (Tiles(600 * 2**20), *unrolled))
        made = rewrite(program, {}, None, choice)
    assert made.did(Unrolled) and made.did(Tiles)


def test_a_softmax_is_repeated_whole():
    """Its sums are few bytes, but XLA:GPU has one kernel for all of it."""
    ops = operations_of(closed())
    names = [o.name for o in ops.graph.operations]
    reductions = {i for i, name in enumerate(names) if name in ("reduce_max",)}
    scores = [
        ops.graph.maker[v]
        for i in reductions
        for v in ops.graph.operations[i].inputs
        if v in ops.graph.maker
    ]
    assert len(scores) == LAYERS
    count = len(names)
    sequence = Reductions(ops).repeated([*range(count), scores[0]])
    again = [names[i] for i in sequence[count:]]
    assert again[:2] == [names[scores[0]], "reduce_max"]
    order = OperationOrder(sequence=tuple(sequence))
    made = rewrite(closed(), {}, None, Choice("h100", (order,)))
    leaves = jax.tree.leaves(arguments())
    got = jaxprs.evaluate(made.jaxpr, leaves)
    for g, w in zip(got, jaxprs.evaluate(closed(), leaves), strict=True):
        np.testing.assert_array_equal(g, w)


def test_of_a_block_of_two_layers_one_may_keep_its_input():
    """As `jax.checkpoint` around a block does; the bytes of the inputs count."""
    pairs = [with_layer_inputs(pair_of(), every) for every in (1, 2)]
    every, half = (pair.kept_on_device(pair.layer_inputs) for pair in pairs)
    one = 2 * ROWS * WIDTH
    assert half == one * math.ceil(every / one / 2)
    least = [unrolled_cut(pair, 1e-3, "h100").bytes for pair in pairs]
    assert half + least[1] < every + least[0]


def test_inputs_of_layers_are_among_the_bytes_of_a_candidate():
    space = space_of((), ((closed(), None),), "h100")
    inputs = with_layer_inputs(pair_of())
    (least,) = (
        c.bytes for c in pareto_front(space) if c.choice.get(Unrolled).layer_inputs
    )
    assert least > inputs.kept_on_device(inputs.layer_inputs)


def test_the_front_counts_the_layer_that_is_there():
    program = closed()
    space = space_of((), ((program, None),), "h100")
    front = pareto_front(space)
    assert len(front) > 2
    sizes = [one.bytes for one in front]
    assert sizes == sorted(set(sizes), reverse=True)
    assert any(one.choice.get(Unrolled).layer_inputs for one in front)
    config = front[-1].choice.get(Unrolled)
    pair, rate = with_layer_inputs(pair_of(), config.layer_inputs), config.rate
    found = unrolled_cut(pair, rate, "h100")
    there = max(map(pair.kept_on_device, made_together(pair, found)))
    assert front[-1].bytes >= there > 0


def test_gradients_of_weights_end_where_no_other_needs_them():
    program = closed()
    ends = gradient_ends(JaxprGraph(program), Shardings())
    grads = program.jaxpr.outvars[1:]  # behind the loss
    assert ends == set(grads) and len(grads) == 5 * LAYERS


def test_gradients_that_devices_add_up_are_not_waited_for():
    program = closed()
    mesh = jax.sharding.AbstractMesh((2,), ("data",))
    by_rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    count = len(jax.tree.leaves(arguments()[0]))
    given = of_shardings(program, [None] * count + [by_rows, None])
    assert not gradient_ends(JaxprGraph(program), shardings_in(program, given))


def test_a_layer_waits_for_the_gradients_of_the_one_behind_it():
    made = rewritten(Recompute(1e-3), Unrolled(1e-3, False, 1)).jaxpr
    held = set(behind_barriers(made))
    ends = gradient_ends(JaxprGraph(made), Shardings()) | set(made.jaxpr.outvars[1:])
    makers = {v: e for e in made.jaxpr.eqns for v in e.outvars}
    waited = [v for v in ends if primitives.is_barrier(makers[v])]
    assert len(waited) >= 5 * (LAYERS - 1)
    assert all(held.intersection(makers[v].invars) for v in waited)


def test_products_that_give_gradients_are_not_put_off_to_the_end():
    """What they read, 217 MiB of each layer, would be there until then."""

    def temporaries(layers):
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            step, args = models.gradient(None, layers=layers)
            program = jax.make_jaxpr(step)(*args)
        how = Unrolled(4.4e11, True, 1), VocabularyTiles(n=8)
        made = rewrite(program, {}, None, Choice("h100", how))
        run = lambda *args: made.run(jax.tree.leaves(args))
        return jaxmem.estimate(run, *args, target="h100").temp_bytes

    hidden = 16 * 512 * 4 * models.WIDTH * 2  # bytes of a feed-forward
    assert temporaries(3) - temporaries(2) < 2 * hidden


def test_a_budget_of_the_plain_peak_buys_what_may_be_faster():
    """Not the plain step alone, which fits as well."""
    args = arguments()
    how = {"target": "h100", "donate_argnums": (), "cache": False}
    budget = jaxmem.estimate(step, *args, target="h100").peak_bytes
    plan = jaxmem.schedule(step, budget, **how).plan(*args)
    tried = [t.choice for t in plan.tried]
    assert any(choice.get(Unrolled).rate == math.inf for choice in tried)
    free = jaxmem.schedule(step, **how).plan(*args)
    assert plan.scheduled.seconds <= free.scheduled.seconds
    assert plan.scheduled.peak_bytes <= budget


@pytest.mark.slow
@pytest.mark.parametrize("kind", (models.BERT, models.GPT), ids=("bert", "gpt"))
def test_never_behind_a_checkpoint_round_each_layer(kind, tmp_path, monkeypatch):
    """In its bytes, and in no more predicted time."""
    monkeypatch.setenv("JAXMEM_CACHE_DIR", str(tmp_path))
    how = {"target": "h100", "donate_argnums": ()}
    nothing = jax.checkpoint_policies.nothing_saveable
    # as a user's program has it
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        stock, args = models.gradient(nothing, kind, layers=4)
        theirs = jaxmem.estimate(stock, *args, **how)
        plain, args = models.gradient(None, kind, layers=4)
        plan = jaxmem.schedule(plain, theirs.peak_bytes, **how).plan(*args)
    assert plan.scheduled.peak_bytes <= theirs.peak_bytes
    assert plan.scheduled.seconds <= 1.01 * theirs.seconds
