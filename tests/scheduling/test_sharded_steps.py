"""What is told of steps that XLA partitions: of one device, and what devices send."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks.steps.devices import STEPS
from jaxmem.memory.buffers import collectives_of, parse_hlo
from jaxmem.scheduling import predict
from jaxmem.scheduling.search.in_job import first_process

N, LAYERS, TOKENS, WIDTH, HEADS = 8, 4, 64, 64, 8
BATCH = 4 * N
TX = optax.adam(1e-3)
WHOLE = P()
SCALARS = 64  # bytes: XLA for CPU computes some sums of scalars twice


@pytest.fixture(scope="module")
def mesh():
    return jaxmem.target_mesh("h100", (N,), ("data",))


def layer(x, w):
    """Causal attention and an MLP."""
    q, k, v = jnp.split(x @ w["qkv"], 3, -1)
    q, k, v = (a.reshape(*a.shape[:2], HEADS, -1) for a in (q, k, v))
    scores = jnp.einsum("bshd,bthd->bhst", q, k)
    mask = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))
    p = jax.nn.softmax(jnp.where(mask, scores, -1e30), -1)
    x = x + jnp.einsum("bhst,bthd->bshd", p, v).reshape(x.shape)
    return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None


def step(state, x):
    params, moments = state
    run = lambda params: jnp.square(lax.scan(layer, x, params)[0]).sum()
    updates, moments = TX.update(jax.grad(run)(params), moments, params)
    return optax.apply_updates(params, updates), moments


def arguments(batch: int, place=lambda spec: None, spec=WHOLE):
    put = lambda shape, spec: jax.ShapeDtypeStruct(
        shape, jnp.float32, sharding=place(spec)
    )
    params = {
        "qkv": put((LAYERS, WIDTH, 3 * WIDTH), spec),
        "up": put((LAYERS, WIDTH, 4 * WIDTH), spec),
        "down": put((LAYERS, 4 * WIDTH, WIDTH), spec),
    }
    moments = jax.eval_shape(TX.init, params)
    moments = jax.tree.map(lambda m: put(m.shape, spec if m.ndim else P()), moments)
    return (params, moments), put((batch, TOKENS, WIDTH), P("data"))


def on(mesh, spec=WHOLE):
    return arguments(BATCH, lambda spec: NamedSharding(mesh, spec), spec)


@pytest.mark.fast("h100")
@pytest.mark.parametrize("target", ["h100", "tpu-v5e"])
def test_data_parallel_is_predicted_as_a_step_on_a_part_of_the_batch(mesh, target):
    how = {"target": target, "donate_argnums": 0}
    assert predict(step, *on(mesh), **how) == predict(
        step, *arguments(BATCH // N), **how
    )


@pytest.mark.slow
def test_what_a_plan_tells_is_of_one_device(mesh):
    def plan(args):
        return jaxmem.schedule(step, donate_argnums=0, progress=False).plan(*args)

    own, same, whole = map(plan, (on(mesh), arguments(BATCH // N), arguments(BATCH)))
    rows = lambda plan: (plan.released_bytes, plan.residual_bytes, plan.residuals)
    sizes = lambda plan: sorted(r.bytes for r in (*plan.gradients, *plan.residuals))
    assert own.residual_bytes > 0 and rows(own)[:2] == rows(same)[:2]
    assert sizes(own) == sizes(same)
    assert 0 < own.predicted_bytes < whole.predicted_bytes / 2


@pytest.mark.slow
def test_sharded_parameters_are_released_by_their_shards(mesh):
    args = on(mesh, P(None, "data"))
    plan = jaxmem.schedule(step, donate_argnums=0, progress=False).plan(*args)
    params = args[0][0]
    assert plan.released_bytes == 4 * sum(x.size for x in params.values()) // N


def test_no_process_holds_what_is_on_a_mesh_of_absent_chips(mesh):
    places = tuple(x.sharding for x in jax.tree.leaves(on(mesh)))
    assert first_process((*places, None)) is None


def test_a_plan_says_where_nothing_is_known():
    meshes = [jaxmem.target_mesh("h100", (N,), (name,)) for name in ("data", "other")]
    (state, x), (_, y) = (
        arguments(BATCH, lambda spec, m=m: NamedSharding(m, P())) for m in meshes
    )
    del x
    plan = jaxmem.schedule(step, donate_argnums=0, progress=False).plan(state, y)
    assert any("several meshes" in note for note in plan.notes)


def test_values_and_bytes_sent_on_host_devices():
    """What is recomputed along an axis that is sharded is not sent once more."""
    mesh = jax.make_mesh((4, 2), ("data", "model"), (jax.sharding.AxisType.Auto,) * 2)
    place = lambda spec: NamedSharding(mesh, spec)
    args = arguments(BATCH, place, P(None, "data", "model"))
    rng = np.random.default_rng(0)
    normal = lambda x: jnp.asarray(0.1 * rng.standard_normal(x.shape), x.dtype)
    args = jax.tree.map(lambda x: jax.device_put(normal(x), x.sharding), args)
    args = jax.tree.map(lambda x: jnp.abs(x) if x.ndim else x, args)
    plain = jax.jit(step)
    scheduled = jaxmem.schedule(step, donate_argnums=(), progress=False)
    sent = []
    for fn in (plain, scheduled):
        text = fn.lower(*args).compile().as_text()
        found = collectives_of(parse_hlo(text))
        sent.append(sum(one.sent for one in found if one.bytes > SCALARS))
    assert 0 < sent[1] <= sent[0]
    pairs = zip(*(jax.tree.leaves(fn(*args)) for fn in (scheduled, plain)), strict=True)
    for got, wanted in pairs:
        np.testing.assert_allclose(got, wanted, rtol=1e-3, atol=1e-5)


@pytest.fixture
def jax_as_it_is():
    """As the benchmark's steps are traced: with jax's own promotion."""
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        yield


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_predictions_for_an_h100(name, jax_as_it_is):
    made = STEPS[name]("h100")
    how = {"target": "h100", "donate_argnums": made.donate}
    predicted = predict(made.step, *made.args, **how).peak_bytes
    compiled = jaxmem.estimate(made.step, *made.args, **how).peak_bytes
    most = 0.15 if "unpinned" in name else 0.1
    assert abs(predicted / compiled - 1) <= most


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_scheduled_step_sends_no_more(name, jax_as_it_is):
    made = STEPS[name]("h100")
    how = {"target": "h100", "donate_argnums": made.donate, "progress": False}
    plan = jaxmem.schedule(made.step, **how).plan(*made.args)
    assert plan.plain is not None and plan.scheduled is not None
    assert 0 < plan.scheduled.sent_bytes <= plan.plain.sent_bytes
