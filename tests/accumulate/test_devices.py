"""The step in `jax.shard_map`: n micro-batches on each of M devices are n M on one."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxmem.accumulate import microbatch
from jaxmem.memory.buffers import collectives_of, parse_hlo
from jaxmem.optim import AdamAState, adama, scale_by_adama
from tests.accumulate import problem
from tests.accumulate.problem import LR, RTOL, assert_close, assert_same
from tests.arrays import array
from tests.sets import some_fast

M = 8
PARAMS = problem.params()
VMA = pytest.mark.parametrize("check_vma", [True, False], ids=["vma", "no_vma"])
# the device's, and that of one device
MAKERS = {
    "sgd": lambda axis: optax.sgd(LR),
    "adam": lambda axis: optax.adam(LR),
    "adama": lambda axis: adama(LR, axis_name=axis, b2=0.9),
}
OPTIMIZERS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
ADAMS = pytest.mark.parametrize(
    "make", [MAKERS["adam"], MAKERS["adama"]], ids=["adam", "adama"]
)


def mesh_of(devices, names=("data",), shape=None):
    types = (AxisType.Auto,) * len(names)
    return jax.make_mesh(
        shape or (devices,), names, types, devices=jax.devices()[:devices]
    )


def on_devices(step, devices=M, check_vma=True, mesh=None):
    """`step` in a map; its last argument but one is the batch.

    Types tell that the results are replicated; without them all devices' are looked at.
    """
    mesh = mesh or mesh_of(devices)
    rows = P(mesh.axis_names)

    def stacked(*args):
        out = step(*args)
        return out if check_vma else jax.tree.map(lambda x: x[None], out)

    @jax.jit
    def run(*args):
        specs = tuple(rows if i == len(args) - 2 else P() for i in range(len(args)))
        outs = P() if check_vma else rows
        options = {"mesh": mesh, "check_vma": check_vma}
        return jax.shard_map(stacked, in_specs=specs, out_specs=outs, **options)(*args)

    return run if check_vma else lambda *args: the_same(run(*args))


def the_same(tree):
    for x in jax.tree.leaves(tree):
        for row in x[1:]:
            np.testing.assert_array_equal(row, x[0])
    return jax.tree.map(lambda x: x[0], tree)


def spread(step, *args, **options):
    return on_devices(step, **options)(*args)


def in_order_of_one(batch, n, devices=M):
    """So that micro-batch i of device d, rows i, i + n, ... of its own, is d n + i.

    Of n M micro-batches on one device, j has the rows j, j + n M, ...
    """

    def reordered(x):
        parts = x.reshape(devices, -1, n, *x.shape[1:])  # device, example, micro-batch
        return parts.swapaxes(0, 1).reshape(x.shape)

    return jax.tree.map(reordered, batch)


def marked(name, values):
    """A batch of 2 examples a micro-batch, each marked with its micro-batch's value.

    `values` are [M, n].
    """
    values = np.asarray(values, np.float32)
    rows = np.stack([values, values], 1).reshape(-1)  # device, example, micro-batch
    return problem.batch(rows.size) | {name: jnp.asarray(rows)}


def numbers(state):
    """An optimizer's state without the number of micro-batches, which may differ."""
    fields = lambda s: (s.count, s.micro_step, s.mu, s.nu)
    is_adama = lambda s: isinstance(s, AdamAState)
    each = lambda s: fields(s) if is_adama(s) else s
    return jax.tree.map(each, state, is_leaf=is_adama)


def check(make, n, batches, *, loss=problem.loss, **options):
    """Mini-batches one after another, on M devices and on one; the last metrics."""
    tx, one = make("data"), make(None)
    step = microbatch(loss, tx, n, axis_name="data", **options)
    whole = microbatch(loss, one, n * M, donate=False, **options)
    steps = [on_devices(step, check_vma=check_vma) for check_vma in (True, False)]
    got, want = [(PARAMS, tx.init(PARAMS), {})] * 2, (PARAMS, one.init(PARAMS), {})
    rtol = 2 * len(batches) * RTOL
    for batch in batches:
        want = whole(*want[:2], in_order_of_one(batch, n), None)
        got = [f(*g[:2], batch, None) for f, g in zip(steps, got, strict=True)]
        for _, _, metrics in got:
            assert_close(metrics, want[2])
    for params, state, _ in got:
        assert_close(params, want[0], atol=len(batches) * LR * RTOL)
        assert_close(numbers(state), numbers(want[1]), rtol=rtol)
    return want[2]


@pytest.mark.parametrize(
    "make", some_fast(MAKERS.values(), MAKERS["adam"], MAKERS["adama"]), ids=MAKERS
)
@pytest.mark.parametrize("n", some_fast([4, 1], 4))
def test_as_on_one_device(make, n):
    def loss(params, batch, rng):
        return problem.loss(params, batch, rng), {"sum": batch["x"].sum(0)}

    batches = [problem.batch(2 * n * M, seed) for seed in (1, 2)]
    check(make, n, batches, loss=loss, has_aux=True)


def bad_loss(params, batch, rng):
    return problem.loss(params, batch, rng) + batch["bad"].sum()


def bad_gradient(params, batch, rng):
    """A finite loss, and the gradient of sqrt at 0."""
    rest = jnp.where(jnp.isnan(batch["bad"]).any(), 0.0, 1.0) * params["b"][0]
    return problem.loss(params, batch, rng) + jnp.sqrt(rest)


SKIPS = pytest.mark.parametrize(
    ("loss", "skip"),
    [(bad_loss, "loss"), (bad_gradient, "gradients")],
    ids=["loss", "gradients"],
)


@pytest.mark.parametrize(
    "make",
    some_fast([MAKERS["adam"], MAKERS["adama"]], MAKERS["adama"]),
    ids=["adam", "adama"],
)
@SKIPS
def test_those_left_out_are_zero_gradients(make, loss, skip):
    """One device keeps nothing, one only its last, one only its first."""
    bad = np.zeros((M, 3))
    bad[0], bad[1, :2], bad[2, 1:] = np.nan, np.nan, np.nan
    none = np.where(np.arange(3) == 0, np.nan, bad)  # kept the first time by no device
    batches = [marked("bad", x) for x in (bad, none)]
    options = {"loss": loss, "skip_nonfinite": skip}
    metrics = check(make, 3, batches, **options)
    assert int(metrics["skipped"]) == 3 + 2 + 3 + 5


@pytest.mark.fast("1-True-adam", "2-True-adama", "2-False-adama")
@ADAMS
@pytest.mark.parametrize(("n", "check_vma"), [(1, True), (2, True), (2, False)])
def test_nothing_changes_where_all_are_left_out(make, n, check_vma, devices=3):
    """To the bit, also with devices by whose number division is not exact."""
    tx = make("data")
    options = {"skip_nonfinite": "gradients", "axis_name": "data"}
    step = microbatch(bad_loss, tx, n, **options)
    step = on_devices(step, devices, check_vma)
    run = lambda state, mark: step(
        *state, marked("bad", np.full((devices, n), mark)), None
    )
    *before, _ = run((PARAMS, tx.init(PARAMS)), 0.0)
    *after, metrics = run(before, np.nan)
    assert_same(after, before)
    assert int(metrics["skipped"]) == n * devices and np.isnan(metrics["loss"])


def token_loss(params, batch, rng):
    """The mean over tokens: 0/0 without any."""
    per = problem.per_example(params, batch["x"]) * batch["tokens"]
    return per.sum() / batch["tokens"].sum()


@pytest.mark.parametrize(
    ("name", "n"),
    [pytest.param("adam", 1, marks=pytest.mark.slow), ("adam", 3), ("adama", 3)],
)
def test_weights_count_over_all_devices(name, n):
    tokens = np.random.default_rng(0).integers(1, 9, (M, n))
    tokens[3], tokens[5, :1] = 0, 0
    batches = [marked("tokens", x) for x in (tokens, tokens[::-1])]
    options = {"loss": token_loss, "weight_fn": lambda b: b["tokens"].sum()}
    check(MAKERS[name], n, batches, **options)


@pytest.mark.slow
def test_clipping_before_adama_sees_a_micro_batch():
    """Each gradient has a norm over 1, so the order of clip and mean is seen."""
    make = lambda axis: optax.chain(
        optax.clip_by_global_norm(1.0), adama(LR, axis_name=axis)
    )
    check(make, 2, [problem.batch(4 * M, seed) for seed in (1, 2)])


@pytest.mark.slow
def test_injected_hyperparameters():
    make = lambda axis: optax.inject_hyperparams(adama)(LR, axis_name=axis)
    bad = np.zeros((M, 2))
    bad[0] = np.nan
    check(make, 2, [marked("bad", bad)], loss=bad_loss, skip_nonfinite=True)


def test_noise_before_adama_stays_the_same_on_all_devices():
    """Its key advances with micro-batches that are left out too, or not at all."""
    noise = optax.add_noise(0.1, 0.5, jax.random.key(0))
    tx = optax.chain(noise, adama(LR, axis_name="data"))
    options = {"skip_nonfinite": True, "axis_name": "data"}
    step = on_devices(microbatch(bad_loss, tx, 2, **options))
    bad = np.zeros((M, 2))
    bad[1:] = np.nan
    states = [
        step(PARAMS, tx.init(PARAMS), marked("bad", x), None)[1][0]
        for x in (bad, np.full((M, 2), np.nan))
    ]
    first = tx.init(PARAMS)[0]
    assert int(states[0].count) == 2 and states[0].rng_key != first.rng_key
    assert int(states[1].count) == 0 and states[1].rng_key == first.rng_key


@pytest.mark.fast("adama-vma", "adam-no_vma")
@VMA
@pytest.mark.parametrize("name", ["adama", "adam"])
def test_model_state(name, check_vma, n=2):
    """Through the micro-batches of a device, then the mean over devices."""

    def loss(params, state, batch, rng):
        mean = 0.5 * state["mean"] + 0.5 * batch["x"].mean(0)
        value = problem.loss(params, batch, None) + batch["bad"].sum()
        return value, {**state, "mean": mean, "count": state["count"] + 1}

    bad = np.zeros((M, n))
    bad[0], bad[1, 1] = np.nan, np.nan
    state = {
        "mean": jnp.ones((3,)),
        "count": jnp.int32(0),
        "key": jax.random.key(7),
    }
    tx, batch = MAKERS[name]("data"), marked("bad", bad)
    options = {"skip_nonfinite": True, "axis_name": "data"}
    step = microbatch(loss, tx, n, has_model_state=True, **options)
    key = lambda s: s | {"key": jax.random.key_data(s["key"])}
    run = lambda p, o, s, b, r: (out := step(p, o, s, b, r))[:2] + (key(out[2]),)
    args = PARAMS, tx.init(PARAMS), state
    *_, got = spread(run, *args, batch, None, check_vma=check_vma)
    x = np.asarray(batch["x"]).reshape(M, 2, n, 3).mean(1, dtype=np.float64)
    means = np.ones((M, 3))
    for i in range(n):
        kept = ~np.isnan(bad[:, i : i + 1])
        means = np.where(kept, 0.5 * means + 0.5 * x[:, i], means)
    assert_close(got["mean"], means.mean(0))
    assert int(got["count"]) == n
    assert_same(got, got | {"key": jax.random.key_data(state["key"])})


@pytest.mark.fast("True-vma", "False-no_vma")
@VMA
@pytest.mark.parametrize("raw", [True, False])
def test_every_device_has_keys_of_its_own(raw, check_vma, n=2):
    """One metric a (device, micro-batch), all different, the same the next time."""

    def loss(params, batch, rng):
        place = jax.nn.one_hot(batch["place"][0].astype(int), n * M)
        draw = place * jax.random.uniform(rng)
        return problem.loss(params, batch, None), {"draw": draw}

    tx = optax.sgd(LR)
    step = microbatch(loss, tx, n, has_aux=True, axis_name="data")
    batch = marked("place", np.arange(n * M).reshape(M, n))
    key = (jax.random.PRNGKey if raw else jax.random.key)(0)
    args = PARAMS, tx.init(PARAMS), batch, key
    step = on_devices(step, check_vma=check_vma)
    draws = [step(*args)[2]["draw"] for _ in range(2)]
    assert np.unique(draws[0]).size == n * M
    assert_same(*draws)


@pytest.mark.fast("adama")
@ADAMS
def test_two_axes(make):
    n, batch = 2, problem.batch(4 * M)
    axes = ("data", "more")
    tx, one = make(axes), make(None)
    step = microbatch(problem.loss, tx, n, axis_name=axes)
    mesh = mesh_of(M, axes, (4, 2))
    got = spread(step, PARAMS, tx.init(PARAMS), batch, None, mesh=mesh)
    whole = microbatch(problem.loss, one, n * M, donate=False)
    want = whole(PARAMS, one.init(PARAMS), in_order_of_one(batch, n), None)
    assert_close(got[0], want[0], atol=LR * RTOL)


def test_in_vmap():
    n, batch, tx = 2, problem.batch(4 * M), MAKERS["adama"]("data")
    options = {"axis_name": "data", "skip_nonfinite": True}
    step = microbatch(problem.loss, tx, n, **options)
    rows = jax.tree.map(lambda x: x.reshape(M, -1, *x.shape[1:]), batch)
    # out_axes=None refuses what differs between devices
    axes = {"in_axes": (None, None, 0), "out_axes": None, "axis_name": "data"}
    run = jax.vmap(lambda p, s, b: step(p, s, b, None), **axes)
    got = jax.jit(run)(PARAMS, tx.init(PARAMS), rows)
    want = spread(step, PARAMS, tx.init(PARAMS), batch, None)
    assert_close(got, want, atol=LR * RTOL)


@pytest.mark.fast("adama")
@ADAMS
def test_train_state(make):
    tx, off = make("data"), marked("bad", np.full((M, 2), np.nan))
    on = off | {"bad": jnp.zeros_like(off["bad"])}
    options = {"axis_name": "data", "skip_nonfinite": True}
    step = on_devices(microbatch(bad_loss, tx, 2, **options))
    state = TrainState.create(apply_fn=None, params=PARAMS, tx=tx)
    state, _ = step(state, off, None)
    assert int(state.step) == 0
    state, _ = step(state, on, None)
    assert int(state.step) == 1
    want = step(PARAMS, tx.init(PARAMS), on, None)
    assert_same((state.params, state.opt_state), want[:2])


class Model(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(3, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.dropout(self.norm(self.dense(x)))


@VMA
def test_nnx(check_vma):
    """Made and taken apart inside of the map, as nnx objects are under plain jax."""
    tx = adama(LR, axis_name="data")
    loss = lambda model, batch, rng: (model(batch["x"]) ** 2).mean()
    step = microbatch(loss, tx, 2, axis_name="data")
    model = Model(nnx.Rngs(0))
    parts: Any = nnx.split((model, nnx.Optimizer(model, tx, wrt=nnx.Param)))

    def run(state, batch, rng):
        model, optimizer = nnx.merge(parts[0], state)
        metrics = step(model, optimizer, batch, rng)
        stats = nnx.as_pure(nnx.state(model, (nnx.Param, nnx.BatchStat)))
        return stats, optimizer.step[...], metrics

    out = spread(run, parts[1], problem.batch(4 * M), None, check_vma=check_vma)
    stats, steps, metrics = out
    assert int(steps) == 1 and np.isfinite(metrics["loss"])
    assert not np.allclose(stats["norm"]["mean"], 0)
    moved = stats["dense"]["kernel"] - model.dense.kernel[...]
    assert np.abs(moved).max() > 0


def layers_loss(params, batch, rng):
    """Gradients of scanned layers, which are moved into the backward pass."""
    layer = lambda x, w: (jnp.exp(0.1 * x @ w), None)
    y, _ = jax.lax.scan(layer, batch["x"], params["layers"])
    return problem.loss(params, {"x": y}, None) + batch["bad"].sum()


@pytest.mark.parametrize(
    "make",
    some_fast([MAKERS["adam"], MAKERS["adama"]], MAKERS["adama"]),
    ids=["adam", "adama"],
)
def test_scanned_layers(make, n=2):
    layers = array(np.random.default_rng(0).uniform(0.1, 0.5, (4, 3, 3)))
    params = PARAMS | {"layers": layers.astype(jnp.float32)}
    bad = np.zeros((M, n))
    bad[0], bad[1, 1] = np.nan, np.nan
    batch, tx, one = marked("bad", bad), make("data"), make(None)
    options: Any = {"skip_nonfinite": True}
    step = microbatch(layers_loss, tx, n, axis_name="data", **options)
    whole = microbatch(layers_loss, one, n * M, donate=False, **options)
    want = whole(params, one.init(params), in_order_of_one(batch, n), None)
    args = params, tx.init(params), batch, None
    for check_vma in (True, False):
        got = spread(step, *args, check_vma=check_vma)
        # through four layers as many roundings more
        assert_close(got[0], want[0], rtol=4 * RTOL, atol=4 * LR * RTOL)
        assert_close(numbers(got[1]), numbers(want[1]), rtol=8 * RTOL)


@pytest.mark.fast("adam-no_vma", "adama-vma")
@VMA
@ADAMS
def test_one_reduction_a_step(make, check_vma):
    """None in the loop over micro-batches: each parameter once, or m and v of it."""
    tx = make("data")
    step = microbatch(problem.loss, tx, 4, axis_name="data")
    specs = (P(), P(), P("data"), P())
    run = jax.shard_map(
        step, mesh=mesh_of(M), in_specs=specs, out_specs=P(), check_vma=check_vma
    )
    args = PARAMS, tx.init(PARAMS), problem.batch(8 * M), None
    text = jax.jit(run).lower(*args).compile().as_text()
    found = [c for c in collectives_of(parse_hlo(text)) if c.kind == "all-reduce"]
    assert not any(c.loops for c in found)
    # the rest are scalars: the loss and its weight
    size = sum(x.nbytes for x in jax.tree.leaves(PARAMS))
    times = 2 if isinstance(tx.init(PARAMS)[0], AdamAState) else 1
    assert 0 <= sum(c.bytes for c in found) - times * size <= 8


def call(tx, n=2, check_vma=True, **options):
    options = {"axis_name": "data"} | options
    step = microbatch(problem.loss, tx, n, **options)
    state = tx.init(PARAMS)
    spread(step, PARAMS, state, problem.batch(4 * M), None, check_vma=check_vma)


@VMA
@pytest.mark.parametrize("name", [None, "other"])
def test_an_adama_of_other_axes(name, check_vma):
    tx = adama(LR, axis_name=name)
    text = "axis_name='data'.*same axis_name" if name is None else "'other'"
    with pytest.raises(ValueError, match=text):
        call(tx, check_vma=check_vma)


@pytest.mark.parametrize("n", [1, 2])
def test_a_step_without_the_axes_of_its_adama(n):
    tx = adama(LR, axis_name="data")
    with pytest.raises(ValueError, match=r"microbatch\(axis_name=...\)"):
        call(tx, n, axis_name=None)


@VMA
def test_a_state_before_adama_that_follows_gradients(check_vma):
    tx = optax.chain(optax.trace(0.9), scale_by_adama(axis_name="data"))
    with pytest.raises(ValueError, match=r"opt_state\[0\].*differ from device"):
        call(tx, check_vma=check_vma)


@pytest.mark.parametrize("name", ["adam", "adama"])
def test_outside_of_a_map(name):
    tx = MAKERS[name]("data")
    step = microbatch(problem.loss, tx, 2, axis_name="data")
    with pytest.raises(ValueError, match="axis_name='data'.*shard_map"):
        step(PARAMS, tx.init(PARAMS), problem.batch(), None)


@pytest.mark.parametrize("name", ["adam", "adama"])
def test_sharded_parameters(name):
    tx = MAKERS[name]("data")
    step = microbatch(problem.loss, tx, 2, axis_name="data")
    run = lambda p, b: step(p, tx.init(PARAMS), b, None)
    specs = {"in_specs": P("data"), "out_specs": (P("data"), P(), P())}
    run = jax.jit(jax.shard_map(run, mesh=mesh_of(M), **specs))
    params = jax.tree.map(lambda x: jnp.concatenate([x] * M), PARAMS)
    with pytest.raises(ValueError, match=r"params\['b'\] varies"):
        run(params, problem.batch(4 * M))


@pytest.mark.parametrize("axis_name", [(), 3, ("data", 0)])
def test_bad_names(axis_name):
    with pytest.raises(ValueError, match="axis_name="):
        microbatch(problem.loss, optax.sgd(LR), 2, axis_name=axis_name)
