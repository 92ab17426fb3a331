"""AdamA on eight devices: under sharded `jit`, and under `jax.shard_map`."""

import functools

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.memory.buffers import collectives_of, parse_hlo
from jaxmem.optim import (
    AdamAState,
    MultiSteps,
    accumulate_step,
    adama,
    apply_step,
    scale_by_adama,
    start_step,
)
from tests.arrays import array
from tests.optim.reference import RTOL, adama_tree, assert_near, gradients, tree
from tests.sets import some_fast

PARAMS = tree()
STEPS = 3


def mesh_of(devices=8, shape=None, names=("data",)):
    types = (AxisType.Auto,) * len(names)
    chosen = jax.devices()[:devices]
    return jax.make_mesh(shape or (devices,), names, axis_types=types, devices=chosen)


def linear_loss(params, coefficients):
    """Its gradient is `coefficients`."""
    terms = jax.tree.map(lambda p, c: jnp.sum(p * c), params, coefficients)
    return sum(jax.tree.leaves(terms), jnp.zeros((), terms["b"].dtype))


def mini_batch(tx, axis_name, params, state, grads, weights=None, keeps=None):
    """One step as a user writes it; leaves of `grads` are [n, ...], of this device."""
    state, local = start_step(state, params, axis_name)
    n = len(grads["b"])

    def micro(state, one):
        g, weight, keep = one
        g = jax.grad(linear_loss)(local, g)
        extra = {"micro_batches": n, "weight": weight, "keep": keep}
        return accumulate_step(tx, g, state, params, **extra), None

    state, _ = jax.lax.scan(micro, state, (grads, weights, keeps))
    updates, state = apply_step(tx, state, params)
    return optax.apply_updates(params, updates), state


def train(tx, axis_name, params, *per_micro_batch):
    """(params, state) after mini-batches along axis 0."""

    def mini(carry, items):
        return mini_batch(tx, axis_name, *carry, *items), None

    return jax.lax.scan(mini, (params, tx.init(params)), per_micro_batch)[0]


def mapped(tx, mesh, params, *per_micro_batch, check_vma=True):
    """`train` in shard_map, micro-batches spread along axis 1."""
    axes = mesh.axis_names
    axis_name = axes if len(axes) > 1 else axes[0]
    run = jax.shard_map(
        functools.partial(train, tx, axis_name),
        mesh=mesh,
        in_specs=(P(), *(P(None, axes) for _ in per_micro_batch)),
        out_specs=P(),
        check_vma=check_vma,
    )
    return jax.jit(run)(params, *per_micro_batch)


def moments(state):
    (found,) = (s for s in state if isinstance(s, AdamAState))
    return found.mu, found.nu


@pytest.mark.fast("paper-1-False", "paper-4-True", "mean-4-False")
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("n", [1, 4])
@pytest.mark.parametrize("v_scale", ["paper", "mean"])
def test_devices_are_more_micro_batches(v_scale, n, check_vma):
    """8 devices of n micro-batches are one of 8 n, by the formulas."""
    grads = gradients(8 * n, steps=10)
    hyper = {"b2": 0.99, "eps": 1e-6, "weight_decay": 0.1, "v_scale": v_scale}
    tx = adama(1e-3, **hyper, axis_name="data")
    got, state = mapped(tx, mesh_of(), PARAMS, grads, check_vma=check_vma)
    want = adama_tree(PARAMS, grads, lr=1e-3, **hyper)
    assert_near(got, want[0], RTOL["float32"])
    assert_near(moments(state), want[1:], 5 * RTOL["float32"])
    assert [int(x) for x in state[0][:3]] == [10, 0, n]


@hypothesis.settings(max_examples=20, deadline=None, derandomize=True)
@hypothesis.given(
    devices=st.integers(1, 6),
    n=st.integers(1, 5),
    seed=st.integers(0, 2**16),
    v_scale=st.sampled_from(["paper", "mean"]),
    b1=st.floats(0.0, 0.99),
    b2=st.floats(0.0, 0.9999),
)
def test_identity(devices, n, seed, v_scale, b1, b2):
    """Any M and N, in float64: a vmap over a named axis is as many devices."""
    with jax.enable_x64(True):
        params = {"b": jnp.linspace(1.0, 2.0, 3)}
        draw = np.random.default_rng(seed).standard_normal((devices, STEPS, n, 3))
        hyper = {"b1": b1, "b2": b2, "eps": 1e-3, "v_scale": v_scale}
        tx = adama(1e-2, **hyper, axis_name="data")
        run = jax.vmap(
            lambda g: train(tx, "data", params, {"b": g}),
            axis_name="data",
            out_axes=None,  # refuses what differs between devices
        )
        got, state = jax.jit(run)(jnp.asarray(draw))
        together = np.moveaxis(draw, 0, 1).reshape(STEPS, devices * n, 3)
        want = adama_tree(params, {"b": together}, lr=1e-2, **hyper)
        assert_near((got, *moments(state)), want, RTOL["float64"])


def test_two_axes():
    grads = gradients(8, steps=STEPS)
    tx = adama(1e-3, axis_name=("data", "more"))
    mesh = mesh_of(shape=(4, 2), names=("data", "more"))
    got, _ = mapped(tx, mesh, PARAMS, grads)
    assert_near(got, adama_tree(PARAMS, grads, lr=1e-3)[0], RTOL["float32"])


def test_weights_count_against_the_mean_over_devices():
    n = 3
    grads = gradients(8 * n, steps=STEPS)
    tokens = np.random.default_rng(0).integers(1, 9, (STEPS, 8 * n))
    shares = tokens / tokens.sum(1, keepdims=True)
    per_device = jnp.asarray(8 * shares, jnp.float32)  # tokens / (all tokens / 8)
    got, state = mapped(
        adama(1e-3, axis_name="data"), mesh_of(), PARAMS, grads, per_device
    )
    want = adama_tree(PARAMS, grads, lr=1e-3, weights=shares)
    assert_near((got, moments(state)), (want[0], want[1:]), 5e-6)


def test_each_device_decides_what_it_keeps():
    """Also one that keeps nothing: its moments decay as the others' do."""
    n = 2
    grads = gradients(8 * n, steps=STEPS)
    keeps = np.random.default_rng(0).integers(0, 2, (STEPS, 8 * n)).astype(bool)
    keeps[:, :n] = False
    masks = lambda g: keeps.reshape(*keeps.shape, *(1,) * (g.ndim - 2))
    bad = jax.tree.map(lambda g: jnp.where(masks(g), g, jnp.nan), grads)
    weights = jnp.full((STEPS, 8 * n), 1 / n)
    tx = adama(1e-3, axis_name="data")
    got, state = mapped(tx, mesh_of(), PARAMS, bad, weights, keeps)
    zero = jax.tree.map(lambda g: np.where(masks(g), g, 0.0), grads)
    want = adama_tree(PARAMS, zero, lr=1e-3)
    assert_near((got, moments(state)), (want[0], want[1:]), 5e-6)


def test_one_call_where_there_is_one_micro_batch():
    """Without start_step, in a chain: no scan carries the moments."""
    grads = gradients(8, steps=STEPS)
    tx = optax.chain(
        optax.clip(0.5),
        scale_by_adama(axis_name="data"),
        optax.scale_by_learning_rate(1e-3),
    )

    def run(params, grads):
        def mini(carry, g):
            params, state = carry
            g = jax.tree.map(lambda x: x[0], g)
            updates, state = tx.update(g, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(mini, (params, tx.init(params)), grads)[0]

    specs = (P(), P(None, "data"))
    run = jax.shard_map(run, mesh=mesh_of(), in_specs=specs, out_specs=P())
    got, _ = jax.jit(run)(PARAMS, grads)
    clipped = jax.tree.map(lambda g: np.clip(g, -0.5, 0.5), grads)
    assert_near(got, adama_tree(PARAMS, clipped, lr=1e-3)[0], RTOL["float32"])


def test_missing_gradients_keep_their_moments():
    """Frozen for a mini-batch by None: v is what it was, not an M-th of it."""
    tx = scale_by_adama(axis_name="data")

    def run(g):
        _, state = tx.update({"x": g[:0], "y": g}, tx.init({"x": g[:0], "y": g}))
        before = state
        _, state = tx.update({"x": g[:0], "y": None}, state)
        return before.mu["y"], before.nu["y"], state.mu["y"], state.nu["y"]

    run = jax.shard_map(run, mesh=mesh_of(), in_specs=P("data"), out_specs=P())
    m, v, new_m, new_v = jax.jit(run)(jnp.arange(1.0, 9.0))
    np.testing.assert_allclose((new_m, new_v), (m, v), rtol=1e-6)


def test_injected():
    grads = gradients(8, steps=STEPS)
    tx = optax.inject_hyperparams(adama)(1e-3, axis_name="data")

    def run(params, grads):
        state = tx.init(params)
        for i in range(STEPS):
            g = jax.tree.map(lambda x: x[i], grads)  # noqa: B023
            params, state = mini_batch(tx, "data", params, state, g)
        return params

    specs = (P(), P(None, "data"))
    run = jax.shard_map(run, mesh=mesh_of(), in_specs=specs, out_specs=P())
    want = adama_tree(PARAMS, grads, lr=1e-3)[0]
    assert_near(jax.jit(run)(PARAMS, grads), want, 2 * RTOL["float32"])


def in_map(fn, *args, specs=None, check_vma=True):
    """`fn` of replicated PARAMS and of what else there is, one row a device."""
    specs = (P(), *(P("data") for _ in args))
    out = jax.shard_map(
        lambda *a: (fn(*a), jnp.zeros(()))[1],
        mesh=mesh_of(),
        in_specs=specs,
        out_specs=P(),
        check_vma=check_vma,
    )
    return out(PARAMS, *args)


TX = adama(1e-3, axis_name="data")
STATE = TX.init(PARAMS)
ROWS = jnp.arange(8.0)


def local(params, x):
    """A gradient of this device."""
    return jax.tree.map(lambda p: p * x[0], params)


def no_start(params, x):
    accumulate_step(TX, local(params, x), STATE, params, micro_batches=2)


def reduced_gradient(params, x):
    state, _ = start_step(STATE, params, "data")
    grads = jax.grad(lambda p: p["b"].sum() * x[0] + p["w"].sum())(params)
    accumulate_step(TX, grads, state, params, micro_batches=2)


def start_twice(params, x):
    state, _ = start_step(STATE, params, "data")
    start_step(state, params, "data")


def start_of_shards(params, x):
    start_step(STATE, local(params, x), "data")


def plain_calls(params, x):
    tx = adama(1e-3, axis_name="data", micro_batches=2)
    tx.update(local(params, x), tx.init(params), params)


def multi_steps(params, x):
    tx = MultiSteps(TX, 2)
    tx.update(local(params, x), tx.init(params), params)


@pytest.mark.parametrize(
    ("fn", "text"),
    [
        (no_start, "moments do not vary.*'data'.*start_step"),
        (multi_steps, "moments do not vary.*MultiSteps"),
        (reduced_gradient, r"gradient \['b'\] does not vary.*start_step"),
        (start_twice, r"\['mu'\]\['b'\] varies"),
        (start_of_shards, r"\['params'\]\['b'\] varies.*sharded"),
        (plain_calls, "micro_batches=2 and no phase"),
    ],
)
def test_what_types_tell(fn, text):
    with pytest.raises(ValueError, match=text):
        in_map(fn, ROWS)


@pytest.mark.parametrize("axis_name", [(), 3, ("data", 0), ["data", None]])
def test_bad_names(axis_name):
    with pytest.raises(ValueError, match="axis_name="):
        adama(1e-3, axis_name=axis_name)


@pytest.mark.parametrize(
    "kwargs", [{"mode": "ema"}, {"mode": "fractional"}, {"nesterov": True}]
)
def test_no_identity(kwargs):
    with pytest.raises(ValueError, match="several devices.*pmean"):
        adama(1e-3, axis_name="data", **kwargs)


def test_outside_of_a_map():
    for call in (
        lambda: start_step(STATE, PARAMS, "data"),
        lambda: TX.update(PARAMS, STATE, PARAMS, phase="accumulate"),
        lambda: TX.update(PARAMS, STATE, PARAMS, phase="apply"),
    ):
        with pytest.raises(ValueError, match="axis_name='data'.*shard_map"):
            call()


def test_start_needs_an_adama():
    with pytest.raises(ValueError, match="no AdamAState"):
        start_step(optax.adam(1e-3).init(PARAMS), PARAMS, "data")


# Under `jit` with sharded arrays.

WIDTH, BATCH, N = 16, 64, 4
# float64 rounds at 1e-16, sums here have up to a thousand terms, and three steps of
# three layers go one into the other.
SUMS = 1e-12


def mlp(params, batch, rng=None):
    del rng

    def layer(x, w):
        return jnp.tanh(x @ w), None

    y, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return jnp.mean(jnp.square(y @ params["head"] - batch["y"]))


def problem():
    r = np.random.default_rng(0)
    draw = lambda *shape: array(r.standard_normal(shape))
    params = {
        "layers": draw(3, WIDTH, WIDTH) / np.sqrt(WIDTH),
        "head": draw(WIDTH, 8),
    }
    return params, [{"x": draw(BATCH, WIDTH), "y": draw(BATCH, 8)} for _ in range(3)]


def steps_of(tx, params, state, batches):
    step = jaxmem.microbatch(mlp, tx, N, donate=False)
    losses = []
    for batch in batches:
        params, state, metrics = step(params, state, batch, None)
        losses.append(metrics["loss"])
    return params, state, losses


SHARDED = {
    "data parallel": {"layers": P(), "head": P()},
    "fsdp": {"layers": P(None, "data"), "head": P("data")},
}


@pytest.mark.parametrize("kind", some_fast(SHARDED, "fsdp"))
def test_sharded_jit_is_one_device(kind):
    """In float64, to what another order of sums gives."""
    with jax.enable_x64(True):
        params, batches = problem()
        tx = adama(1e-2, weight_decay=0.1, micro_batches=N)
        want = steps_of(tx, params, tx.init(params), batches)
        mesh = mesh_of()
        places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), SHARDED[kind])
        params = jax.device_put(params, places)
        batches = jax.device_put(batches, NamedSharding(mesh, P("data")))
        got = steps_of(tx, params, tx.init(params), batches)
        for tree in got[0], *moments(got[1]):
            for name, x in tree.items():
                assert x.sharding.is_equivalent_to(places[name], x.ndim), name
        assert_near(
            (got[0], moments(got[1]), got[2]),
            (want[0], moments(want[1]), want[2]),
            SUMS,
        )


def test_microbatch_in_shard_map():
    """Without types that tell, it needs nothing but an axis_name."""
    with jax.enable_x64(True):
        params, batches = problem()
        tx = adama(1e-2, axis_name="data", micro_batches=N)
        step = jaxmem.microbatch(mlp, tx, N, donate=False)

        def run(params, state, batch):
            params, state, metrics = step(params, state, batch, None)
            return params, state, jax.lax.pmean(metrics["loss"], "data")

        run = jax.shard_map(
            run,
            mesh=mesh_of(),
            in_specs=(P(), P(), P("data")),
            out_specs=P(),
            check_vma=False,
        )
        got, state = params, tx.init(params)
        one = adama(1e-2, micro_batches=8 * N)
        whole = jaxmem.microbatch(mlp, one, 8 * N, donate=False)
        want, want_state = params, one.init(params)
        for batch in batches:
            got, state, loss = jax.jit(run)(got, state, batch)
            reordered = jax.tree.map(one_device_order, batch)
            want, want_state, metrics = whole(want, want_state, reordered, None)
            assert_near(loss, metrics["loss"], SUMS)
        assert_near((got, moments(state)), (want, moments(want_state)), SUMS)


def one_device_order(x):
    """So that micro-batch (i, device) of n on 8 devices is one of 8 n on one.

    A device has rows [8, 8), of which i, i + n are micro-batch i; of one device with
    8 n micro-batches rows j, j + 8 n are micro-batch j.
    """
    per = BATCH // 8
    by = np.arange(BATCH).reshape(8, per // N, N)  # device, example, micro-batch
    return x[by.transpose(1, 0, 2).reshape(-1)]


# Collectives in the compiled step.


def all_reduces(fn, *args):
    """(in loops, outside) of the compiled text, each as often as it runs."""
    text = jax.jit(fn).lower(*args).compile().as_text()
    found = [
        c
        for c in collectives_of(parse_hlo(text))
        if c.kind == "all-reduce" and c.bytes > 4
    ]
    inside = sum(c.times for c in found if c.loops)
    return inside, sum(c.arrays for c in found if not c.loops)


def micro_batched(axis_name, tx, params, state, batches):
    state, local = start_step(state, params, axis_name)

    def micro(state, batch):
        grads = jax.grad(mlp)(local, batch)
        return accumulate_step(tx, grads, state, params, micro_batches=N), None

    state, _ = jax.lax.scan(micro, state, batches)
    updates, state = apply_step(tx, state, params)
    return optax.apply_updates(params, updates), state


def micro_batches_of(batch):
    return jax.tree.map(lambda x: x.reshape(N, -1, *x.shape[1:]), batch)


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_reduction_a_mini_batch(check_vma):
    """None in the loop over micro-batches; m and v of each parameter after it."""
    params, (batch, *_) = problem()
    tx = adama(1e-2, axis_name="data")
    run = jax.shard_map(
        functools.partial(micro_batched, "data", tx),
        mesh=mesh_of(),
        in_specs=(P(), P(), P(None, "data")),
        out_specs=P(),
        check_vma=check_vma,
    )
    args = params, tx.init(params), micro_batches_of(batch)
    assert all_reduces(run, *args) == (0, 2 * len(params))


def test_sharded_jit_reduces_every_micro_batch():
    """What `axis_name` is for, and proof that the count above sees loops."""
    params, (batch, *_) = problem()
    tx = adama(1e-2, micro_batches=N)
    mesh = mesh_of()
    put = lambda x, spec: jax.device_put(x, NamedSharding(mesh, spec))
    batches = put(micro_batches_of(batch), P(None, "data"))

    def run(params, state, batches):
        def micro(state, batch):
            grads = jax.grad(mlp)(params, batch)
            return accumulate_step(tx, grads, state, params, micro_batches=N), None

        state, _ = jax.lax.scan(micro, state, batches)
        updates, state = apply_step(tx, state, params)
        return optax.apply_updates(params, updates), state

    params = put(params, P())
    inside, outside = all_reduces(run, params, put(tx.init(params), P()), batches)
    assert inside >= N and outside == 0
