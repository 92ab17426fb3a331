"""A step that maps itself over the axes of the batch: one reduction under `jit`."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from benchmarks import collectives
from jaxmem.accumulate import microbatch
from jaxmem.optim import adama
from tests.accumulate import problem
from tests.accumulate.problem import LR, RTOL, assert_close
from tests.accumulate.test_devices import in_order_of_one, mesh_of, on_devices

M, N = 4, 2
MESH = mesh_of(M)
MAKERS = {
    "adam": lambda axis: optax.adam(LR),
    "adama": lambda axis: adama(LR, axis_name=axis, b2=0.9),
}
OPTIMIZERS = pytest.mark.parametrize("make", MAKERS.values(), ids=MAKERS)
BATCHES = [problem.batch(2 * N * M, seed) for seed in (1, 2)]


def put(tree, *spec, mesh=MESH):
    return jax.device_put(tree, NamedSharding(mesh, P(*spec)))


def trained(step, tx, params, batches, key=None):
    state = tx.init(params)
    for batch in batches:
        params, state, metrics = step(params, state, batch, key)
    return params, metrics


@pytest.mark.fast("adama")
@OPTIMIZERS
def test_as_in_a_map_of_ones_own(make):
    tx = make("data")
    own = microbatch(problem.loss, tx, N, axis_name="data", donate=False)
    own = on_devices(own, devices=M, mesh=MESH)
    want = trained(own, tx, problem.params(), BATCHES)
    step = microbatch(problem.loss, tx, N, axis_name="data", mesh=MESH)
    batches = [put(batch, "data") for batch in BATCHES]
    got = trained(step, tx, put(problem.params()), batches)
    assert_close(got, want, rtol=len(BATCHES) * RTOL)


@pytest.mark.fast("adam")
@OPTIMIZERS
def test_as_on_one_device(make):
    one, tx = make(None), make("data")
    whole = microbatch(problem.loss, one, N * M, donate=False)
    ordered = [in_order_of_one(batch, N, M) for batch in BATCHES]
    want, loss = trained(whole, one, problem.params(), ordered)
    step = microbatch(problem.loss, tx, N, axis_name="data", mesh=MESH)
    got, found = trained(step, tx, put(problem.params()), BATCHES)
    assert_close(got, want, atol=len(BATCHES) * LR * RTOL)
    assert_close(found, loss)


BOTH = jax.make_mesh((2, 2), ("data", "fsdp"), (AxisType.Auto,) * 2)


@pytest.mark.fast("as it is-adama", "pinned-adam")
@OPTIMIZERS
@pytest.mark.parametrize("pinned", [False, True], ids=["as it is", "pinned"])
def test_other_axes_are_left_to_the_compiler(make, pinned):
    """Parameters over `fsdp`; constraints that name `data` too lose it in the map."""

    def pin(x):
        sharding = NamedSharding(BOTH, P(("data", "fsdp")))
        return jax.lax.with_sharding_constraint(x, sharding) if pinned else x

    def loss(params, batch, rng):
        def layer(x, w):
            return jax.jit(lambda x: pin(jnp.tanh(x @ w)))(x), None

        out = jax.lax.scan(layer, pin(batch), params["w"])[0]
        return jnp.mean(jnp.square(out - 1.0))

    r = np.random.default_rng(0)
    params = {"w": jnp.asarray(r.standard_normal((3, 8, 8)) / 3, jnp.float32)}
    batch = jnp.asarray(r.standard_normal((2 * 2 * 4, 8)), jnp.float32)
    one, tx = make(None), make("data")
    step = microbatch(loss, tx, N, axis_name="data", mesh=BOTH)
    spread = put(params, None, "fsdp", mesh=BOTH)
    got, found = trained(step, tx, spread, [put(batch, ("data", "fsdp"), mesh=BOTH)])
    assert got["w"].sharding.spec == P(None, "fsdp")
    whole = microbatch(loss, one, 2 * N, donate=False)
    want, expected = trained(whole, one, params, [in_order_of_one(batch, N, 2)])
    assert_close(got, want, atol=LR * RTOL)
    assert_close(found, expected)


def test_of_a_train_state_and_of_nnx():
    """The same step in the forms of Flax."""
    tx = optax.sgd(LR)
    how = {"axis_name": "data", "mesh": MESH}
    batch = put(BATCHES[0], "data")
    plain = microbatch(problem.loss, tx, N, **how)
    want, _ = trained(plain, tx, put(problem.params()), [batch])
    state = TrainState.create(apply_fn=None, params=put(problem.params()), tx=tx)
    state, metrics = microbatch(problem.loss, tx, N, **how)(state, batch, None)
    assert_close(state.params, want)
    assert int(state.step) == 1 and np.isfinite(metrics["loss"])

    model = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    before = jax.tree.map(np.asarray, nnx.state(model))
    optimizer = nnx.Optimizer(model, tx, wrt=nnx.Param)
    x = jnp.ones((2 * N * M, 3))
    loss = lambda model, x, rng: jnp.mean(jnp.square(model(x) - 1.0))
    microbatch(loss, tx, N, **how)(model, optimizer, put(x, "data"), None)
    again = nnx.Linear(3, 2, rngs=nnx.Rngs(0))
    microbatch(loss, tx, N)(again, nnx.Optimizer(again, tx, wrt=nnx.Param), x, None)
    assert_close(nnx.state(model), nnx.state(again))
    assert float(jnp.abs(model.kernel[...] - before["kernel"][...]).max()) > 0


def test_bad_calls():
    tx = optax.sgd(LR)
    with pytest.raises(ValueError, match="mesh: name the axes"):
        microbatch(problem.loss, tx, N, mesh=MESH)
    with pytest.raises(ValueError, match="axis_name='model': the mesh has the axes"):
        microbatch(problem.loss, tx, N, mesh=MESH, axis_name="model")
    with pytest.raises(TypeError, match="mesh"):
        microbatch(problem.loss, tx, N, mesh="data", axis_name="data")
    step = microbatch(problem.loss, tx, N, mesh=MESH, axis_name="data")
    params = problem.params()
    with pytest.raises(ValueError, match=r"multiple of n=2 .* times the 4 devices"):
        step(params, tx.init(params), problem.batch(N * M + N), None)
    spread = {"w": put(jnp.ones((8, 8)), "data")}
    with pytest.raises(ValueError, match=r"params\['w'\] is sharded over .*'data'"):
        step(spread, tx.init(spread), problem.batch(2 * N * M), None)


CASES = {(case.what, case.under): case for case in collectives.cases()}


def chips(what: str, under: str) -> dict[str, float]:
    """A row of the benchmark."""
    head = ("step", "under", *collectives.SHOWN, "in loops", "sent", "temp", "ms")
    row = collectives.row(CASES[f"{what}, microbatch", under])
    return dict(zip(head, row, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("what", "sent"), [("accumulation", 1), ("AdamA", 2)])
def test_one_reduction_on_eight_chips(what, sent):
    """MiB sent: twice the bytes of what is reduced, less an eighth (a ring)."""
    found = chips(what, "jit, data parallel, mesh=")
    assert found["in loops"] == 0
    size = 4 * 2 * collectives.LAYERS * collectives.WIDTH * collectives.HIDDEN / 2**20
    assert found["sent"] <= 1.001 * sent * 2 * 7 / 8 * size


@pytest.mark.slow
@pytest.mark.parametrize(("what", "sent"), [("accumulation", 1), ("AdamA", 2)])
def test_less_is_sent_where_another_axis_holds_the_parameters(what, sent):
    """Over two of eight chips once a step, not with every micro-batch; in MiB."""
    under = f"jit, data 2 x FSDP 4, {collectives.LONG} tokens"
    plain, found = chips(what, under), chips(what, f"{under}, mesh=")
    # an all-reduce between two sends a shard of what is reduced
    shard = 4 * 2 * collectives.LAYERS * collectives.WIDTH * collectives.HIDDEN / 4
    saved = (collectives.N - sent) * shard / 2**20
    assert found["sent"] <= plain["sent"] - saved


@pytest.mark.slow
def test_few_tokens_on_two_axes():
    """XLA moves activations over the axis left to it: more than without a mesh."""
    found = chips("accumulation", "jit, data 2 x FSDP 4, mesh=")
    assert found["sent"] <= 5848
