"""Expert, pipeline and context parallel models: scheduled, predicted, substituted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from benchmarks.models.moe import gelu_mlp, mapped, ragged, ragged_shards
from benchmarks.models.on_a_mesh import MODELS, STEPS
from benchmarks.models.parallel import TINY, made
from benchmarks.models.transformers import StackConfig
from benchmarks.models.zoo_transformers import Llama, MixtralLayer, OneHotMixtralLayer
from jaxmem.memory.buffers import collectives_of, parse_hlo
from jaxmem.scheduling import BudgetError, predict

SMALL = 64  # bytes: XLA for CPU computes some sums of scalars twice
RTOL, ATOL = 1e-4, 1e-5  # float32: AdamW divides gradients by their own size
QUICK = ("MoE, one-hot, expert parallel",)
NAMES = [
    pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
    for name in MODELS
]


@pytest.fixture(autouse=True)
def as_benchmarks(standard_jax):
    """With jax's own promotion."""


def mesh_for(name: str):
    _, shape, axes = MODELS[name]
    return jax.make_mesh(shape, axes, (jax.sharding.AxisType.Auto,) * len(shape))


def filled(x, rng):
    if x.ndim < 2:
        values = np.ones(x.shape)
    elif jnp.issubdtype(x.dtype, jnp.integer):
        values = rng.integers(0, TINY.words, x.shape)
    else:
        values = 0.3 * rng.standard_normal(x.shape)
    return jax.device_put(jnp.asarray(values, x.dtype), x.sharding)


def arrays(args):
    """Parameters and tokens of a fixed seed; moments are zero."""
    (params, moments), tokens = args
    rng = np.random.default_rng(0)
    params, tokens = jax.tree.map(lambda x: filled(x, rng), (params, tokens))
    zeros = lambda x: jax.device_put(jnp.zeros(x.shape, x.dtype), x.sharding)
    return (params, jax.tree.map(zeros, moments)), tokens


def tiny(name: str):
    mesh = mesh_for(name)
    step, args, _ = made(MODELS[name].model(mesh, TINY), mesh, TINY)
    return step, arrays(args)


def trained(step, state, tokens):
    losses = []
    for _ in range(3):
        state, loss = step(state, tokens)
        losses.append(float(loss))
    assert losses[2] < losses[1] < losses[0]
    return state, losses


def assert_close(got, wanted):
    for a, b in zip(*map(jax.tree.leaves, (got, wanted)), strict=True):
        np.testing.assert_allclose(a, b, rtol=RTOL, atol=ATOL)


def sent(step, *args) -> int:
    text = step.lower(*args).compile().as_text()
    return sum(c.sent for c in collectives_of(parse_hlo(text)) if c.bytes > SMALL)


@pytest.mark.parametrize("name", NAMES)
def test_a_scheduled_step_trains_alike_and_sends_no_more(name):
    step, args = tiny(name)
    plain = jax.jit(step)
    scheduled = jaxmem.schedule(step, donate_argnums=(), progress=False)
    assert_close(trained(scheduled, *args), trained(plain, *args))
    assert 0 < sent(scheduled, *args) <= sent(plain, *args)


def within(name: str, share: float):
    """The step within a share of the peak that it has without a budget."""
    step, args = tiny(name)
    how = {"donate_argnums": (), "target": "h100", "progress": False}
    first = jaxmem.schedule(step, **how).plan(*args)
    budget = int(share * first.scheduled.peak_bytes)
    return step, args, jaxmem.schedule(step, budget, **how), budget


@pytest.mark.slow
@pytest.mark.parametrize("name", [n for n in MODELS if "ragged" not in n])
def test_within_a_budget_a_step_trains_alike_and_says_what_it_sends_more(name):
    step, args, tight, budget = within(name, 15 / 16)
    plan = tight.plan(*args)
    assert plan.scheduled.peak_bytes <= budget
    more = plan.scheduled.sent_bytes > plan.plain.sent_bytes
    assert ("more than in the original step" in str(plan)) == more
    # for a budget keys and values may be gathered a second time, at a price
    assert not more or "gathered" in name
    assert_close(trained(tight, *args), trained(jax.jit(step), *args))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["MoE, ragged", "context parallel, ring attention"])
def test_a_budget_out_of_reach_is_said_to_be(name):
    """With the reasons, which are looked for inside of `shard_map` too."""
    _, args, tight, _ = within(next(n for n in MODELS if n.startswith(name)), 1 / 8)
    with pytest.raises(BudgetError, match="the lowest peak is"):
        tight.plan(*args)


def gradient(name: str):
    """A model's loss and its gradient, of the same values for all models."""
    mesh = mesh_for(name)
    model, (state, tokens) = MODELS[name].model(mesh, TINY), tiny(name)[1]
    return jax.jit(jax.value_and_grad(model.loss))(state[0], tokens)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("pipeline parallel", "context parallel, ring attention"),
        ("context parallel, gathered", "context parallel, ring attention"),
    ],
)
def test_ways_to_spread_a_model_compute_the_same(name, other):
    assert_close(gradient(name), gradient(other))


def test_experts_in_shards_compute_what_all_experts_do():
    """But for the term that balances them, which is of one device's tokens there."""
    mesh = mesh_for("MoE, ragged, expert parallel")
    rng = np.random.default_rng(0)
    shapes = {"router": (16, 8), "up": (8, 16, 32), "down": (8, 32, 16)}
    w = {name: rng.standard_normal(shape) for name, shape in shapes.items()}
    w = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), w)
    x = jnp.asarray(rng.standard_normal((8, 4, 16)), jnp.float32)
    every = functools.partial(ragged, gelu_mlp)
    shards = functools.partial(ragged_shards, gelu_mlp)
    shards = mapped(mesh, shards, ("data", "expert"), "expert")
    run = lambda mixer: jax.jit(lambda x, w: mixer(x, w)[0])(x, w)
    assert_close(run(shards), run(every))


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_predictions_for_an_h100(name):
    step, args, donate = STEPS[name]("h100")
    how = {"target": "h100", "donate_argnums": donate}
    predicted = predict(step, *args, **how).peak_bytes
    compiled = jaxmem.estimate(step, *args, **how)
    assert abs(predicted / compiled.peak_bytes - 1) <= 0.15
    found = jaxmem.schedule(step, **how, progress=False).plan(*args).scheduled
    # less by much in each: that a few bytes more are sent is no reason to leave it
    assert found.peak_bytes < 0.75 * compiled.peak_bytes
    assert found.seconds < 0.9 * compiled.seconds
    assert 0 < found.sent_bytes <= 1.01 * compiled.sent_bytes


SUBSTITUTED = [
    pytest.param(name, marks=() if "one-hot" in name else pytest.mark.slow)
    for name in MODELS
]


@pytest.mark.parametrize("name", SUBSTITUTED)
def test_substituted_losses(name):
    mesh = mesh_for(name)
    model = MODELS[name].model(mesh, TINY)
    (params, _), tokens = tiny(name)[1]
    lean = jaxmem.substitute(model.loss)
    run = lambda loss: jax.jit(jax.value_and_grad(loss))(params, tokens)
    assert_close(run(lean), run(model.loss))
    assert jaxmem.nn.report(lean).patterns


@pytest.mark.slow
@pytest.mark.parametrize("layer", [MixtralLayer, OneHotMixtralLayer])
@pytest.mark.parametrize("scanned", [True, False])
def test_substituted_mixtures_of_flax(layer, scanned):
    c = StackConfig(2, 32, 4, 2, 64, dropout=0.0, dtype=jnp.float32)
    model = Llama(c, scanned, layer, vocabulary=50)
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, 50, (2, 8)))
    params = model.init(jax.random.key(0), tokens)
    lean = jaxmem.substitute(model)

    def run(model):
        loss = lambda params: jnp.mean(jnp.square(model.apply(params, tokens)))
        return jax.jit(jax.value_and_grad(loss))(params)

    assert_close(run(lean), run(model))
    text = str(jaxmem.nn.report(lean))
    assert "swiglu in" in text and "dot_product_attention in" in text
