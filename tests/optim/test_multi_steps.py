"""MultiSteps: optax's results, without its updates on every call."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, PartitionSpec

from jaxmem.optim import MultiSteps, adama, scale_by_adama
from tests.optim.reference import (
    adama_tree,
    assert_near,
    assert_same,
    at,
    gradients,
    tree,
)

PARAMS = tree()
N, STEPS = 3, 4
GRADS = gradients(N, steps=STEPS)
FLAT = jax.tree.map(lambda g: g.reshape(-1, *g.shape[2:]), GRADS)


def linear(count):
    return 1e-2 / (1 + jnp.asarray(count, float))


def run(multi, params=PARAMS, flat=FLAT):
    """Parameters and state after every call."""
    with jax.numpy_dtype_promotion("standard"):  # for optax
        state, update = multi.init(params), jax.jit(multi.update)
        trail = []
        for i in range(len(flat["w"])):
            updates, state = update(at(flat, i), state, params)
            params = optax.apply_updates(params, updates)
            trail.append((params, state))
    return trail


INNER = {
    "sgd": optax.sgd(0.1, momentum=0.9),
    "adam": optax.adam(linear),
    "adamw": optax.adamw(1e-2),
    "clip": optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)),
}


@pytest.mark.fast("sgd-True", "adam-False", "adamw-True", "clip-False")
@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("name", INNER)
def test_equals_optax(name, mean):
    """The same at every call; a compiler may round the inner update otherwise."""
    ours = MultiSteps(INNER[name], N, use_grad_mean=mean)
    theirs = optax.MultiSteps(INNER[name], N, use_grad_mean=mean)
    for (got, state), (want, other) in zip(run(ours), run(theirs), strict=True):
        assert_near(got, want, 1e-6)
        assert_near(state.inner_opt_state, other.inner_opt_state, 1e-6)
        assert_near(state.acc_grads, other.acc_grads, 1e-6)
        assert_same(state[:2], other[:2])
        assert bool(ours.has_updated(state)) == bool(theirs.has_updated(other))


def test_varying_number_of_micro_batches():
    schedule = lambda step: jnp.where(step < 2, 2, 3)
    ours = MultiSteps(INNER["sgd"], schedule)
    theirs = optax.MultiSteps(INNER["sgd"], schedule)
    for (got, state), (want, other) in zip(run(ours), run(theirs), strict=True):
        assert_near(got, want, 1e-6)
        assert_same(state[:2], other[:2])
    # AdamA: two mini-batches of two, then of three
    moments = run(MultiSteps(adama(1e-3), schedule))
    head = {k: g[:4].reshape(2, 2, *g.shape[1:]) for k, g in FLAT.items()}
    assert_near(moments[3][0], adama_tree(PARAMS, head)[0], 1e-6)
    state = moments[6][1].inner_opt_state[0]
    assert [int(x) for x in state[:3]] == [3, 0, 3]


@pytest.mark.parametrize(
    "opt",
    [
        adama(linear, weight_decay=0.1, micro_batches=7),
        optax.chain(
            scale_by_adama(),
            optax.add_decayed_weights(0.1),
            optax.scale_by_learning_rate(linear),
        ),
        optax.inject_hyperparams(adama)(linear, weight_decay=0.1),
    ],
    ids=["adama", "chain", "inject"],
)
def test_adama_needs_no_accumulator(opt):
    trail = run(MultiSteps(opt, N))
    want = adama_tree(PARAMS, GRADS, lr=lambda t: 1e-2 / (1 + t), weight_decay=0.1)
    assert_near(trail[-1][0], want[0], 1e-6)
    assert trail[0][1].acc_grads == ()
    for i, (params, state) in enumerate(trail):
        assert bool(MultiSteps(opt, N).has_updated(state)) == (i % N == N - 1)
        if i < N - 1:
            assert_same(params, PARAMS)


def test_sum_of_gradients():
    trail = run(MultiSteps(adama(1e-3), N, use_grad_mean=False))
    params, *moments = adama_tree(PARAMS, GRADS, weights=np.ones((STEPS, N)))
    assert_near(trail[-1][0], params, 1e-6)
    assert_near(trail[-1][1].inner_opt_state[0][3:], moments, 5e-6)


def test_inner_update_runs_in_a_branch():
    multi = MultiSteps(optax.adam(1e-3), N)
    with jax.numpy_dtype_promotion("standard"):
        jaxpr = jax.make_jaxpr(multi.update)(PARAMS, multi.init(PARAMS), PARAMS)
    outside = {eqn.primitive.name for eqn in jaxpr.eqns}
    assert "cond" in outside and "sqrt" not in outside
    assert "sqrt" in str(jaxpr)


@pytest.mark.fast("adama")
@pytest.mark.parametrize("opt", [optax.sgd(0.1), adama(0.1)], ids=["sgd", "adama"])
def test_dtypes_hold(opt):
    params, flat = tree(dtype=jnp.bfloat16), gradients(1, 4, dtype=jnp.bfloat16)
    multi = MultiSteps(opt, 2, accumulator_dtype=jnp.bfloat16)
    kinds = lambda tree: jax.tree.map(lambda x: (x.shape, x.dtype), tree)
    state = multi.init(params)
    for i in range(4):
        updates, new = multi.update(at(flat, i, 0), state, params)
        assert kinds(new) == kinds(state) and kinds(updates) == kinds(params)
        state = new
    none = MultiSteps(optax.sgd(0.1), 2, accumulator_dtype=None).init(params)
    assert kinds(none.acc_grads) == kinds(params)
    wide = MultiSteps(optax.sgd(0.1), 2).init(params)
    assert wide.acc_grads["w"].dtype == jnp.float32


@pytest.mark.fast("adama")
@pytest.mark.parametrize("opt", [optax.sgd(0.1), adama(0.1)], ids=["sgd", "adama"])
def test_in_shard_map_and_vmap(opt):
    mesh = jax.make_mesh((8,), ("x",), axis_types=(AxisType.Auto,))
    multi = MultiSteps(opt, 2)
    ranks = jnp.arange(1.0, 9.0)

    def train(scale):
        params = jax.tree.map(lambda p: p * scale, PARAMS)
        state = multi.init(params)
        for i in range(4):
            grads = jax.tree.map(lambda g, i=i: g[i] * scale, FLAT)
            updates, state = multi.update(grads, state, params)
            params = optax.apply_updates(params, updates)
        return params

    spec = PartitionSpec("x")
    one = lambda s: jax.tree.map(lambda p: p[None], train(s[0]))
    sharded = jax.shard_map(one, mesh=mesh, in_specs=spec, out_specs=spec)
    got, mapped = jax.jit(sharded)(ranks), jax.jit(jax.vmap(train))(ranks)
    assert_near(got, mapped, 1e-6)
    assert_near(at(got, 2), train(ranks[2]), 1e-6)


def test_is_a_transformation():
    multi = MultiSteps(optax.trace(0.5), 2)
    tx = optax.chain(multi.gradient_transformation(), optax.scale(-1.0))
    updates, state = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    assert not any(u.any() for u in jax.tree.leaves(updates))
    updates, _ = tx.update(PARAMS, state, PARAMS)
    assert_near(updates, jax.tree.map(jnp.negative, PARAMS), 1e-6)
    assert multi.inner_opt.init(PARAMS).trace["b"].shape == (5,)


def test_without_parameters():
    multi = MultiSteps(adama(0.1), 1)
    updates, _ = multi.update(PARAMS, multi.init(PARAMS))
    # the first step of Adam is the sign of the gradient
    assert_near(updates, jax.tree.map(lambda p: jnp.full_like(p, -0.1), PARAMS), 1e-4)


def test_bad_input():
    with pytest.raises(ValueError, match="every_k_schedule=0"):
        MultiSteps(optax.sgd(0.1), 0)
    mixed = optax.partition(
        {"a": adama(0.1), "s": optax.sgd(0.1)}, {"w": "a", "b": "s"}
    )
    multi = MultiSteps(mixed, 2)
    with pytest.raises(ValueError, match=r"gradients of \['b'\]"):
        multi.update(PARAMS, multi.init(PARAMS), PARAMS)


def test_less_memory_than_optax():
    """AdamA's state is smaller by the accumulator, and its temporaries too."""
    params = {"w": jnp.ones((1 << 16,))}
    size = 4 << 16

    def held(multi):
        step = jax.jit(multi.update, donate_argnums=1)
        with jax.numpy_dtype_promotion("standard"):
            state = jax.eval_shape(multi.init, params)
            memory = step.lower(params, state, params).compile().memory_analysis()
        return memory.argument_size_in_bytes, memory.temp_size_in_bytes

    ours = held(MultiSteps(adama(1e-3), 4))
    theirs = held(optax.MultiSteps(optax.adam(1e-3), 4))
    assert theirs[0] - ours[0] == pytest.approx(size, abs=64)
    assert ours[1] <= theirs[1]
