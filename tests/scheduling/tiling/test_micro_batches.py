"""Steps of every form in micro-batches: which are, what the plan says, and bytes."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax import lax
from jax.flatten_util import ravel_pytree

from jaxmem import schedule
from jaxmem.chips import rates_of
from jaxmem.scheduling import Plan
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from tests.scheduling.tiling.whole_steps import (
    RATE,
    batch_loops,
    check_values,
    descent,
    normal,
    rewritten,
)
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("x64", "standard_jax")

LAYERS, WIDTH, BATCH, LENGTH, PARTS = 3, 8, 8, 6, 4


def data(size: int = BATCH):
    return normal(1, size, LENGTH, WIDTH), normal(2, size, LENGTH, WIDTH)


def weights():
    return normal(0, LAYERS, WIDTH, WIDTH)


def mean_square(found, wanted):
    return ((found - wanted) ** 2).mean()


def layer(h, w):
    return jnp.tanh(h @ w), None


# -- which steps have gradients that are sums over the examples


def scanned(w, x, y):
    """All products are in the bodies of scans."""
    return mean_square(lax.scan(layer, x, w)[0], y)


def rematerialised(w, x, y):
    return mean_square(lax.scan(jax.checkpoint(layer), x, w)[0], y)


def written_out(w, x, y):
    for one in w:
        x, _ = layer(x, one)
    return mean_square(x, y)


def mapped(w, x, y):
    """Attention within a map over the examples, in each layer."""

    def layer(h, w):
        within = lambda one: jax.nn.softmax(one @ w @ one.T) @ one
        return lax.map(within, h), None

    return mean_square(lax.scan(layer, x, w)[0], y)


def own_derivative(w, x, y):
    """Both passes written without `jax.grad`."""
    h, inputs = lax.scan(lambda h, w: (jnp.tanh(h @ w), h), x, w)

    def backward(g, of_layer):
        w, h = of_layer
        g = g * (1 - jnp.tanh(h @ w) ** 2)
        return g @ w.T, jnp.einsum("bsd,bse->de", h, g)

    g = 2 * (h - y) / h.size
    _, grads = lax.scan(backward, g, (w, inputs), reverse=True)
    return w - RATE * grads, mean_square(h, y)


def one_vector(params, x, y):
    """Gradients become one vector, whose norm is clipped."""
    loss = lambda p: scanned(p["layers"], x, y) + mean_square(x @ p["head"], y)
    value, grads = jax.value_and_grad(loss)(params)
    vector, tree_of = ravel_pytree(grads)
    vector = vector / jnp.maximum(1, jnp.linalg.norm(vector))
    new = jax.tree.map(lambda w, g: w - RATE * g, params, tree_of(vector))
    return new, value


def biases(b, x, y):
    """Only biases are trained: no product makes their gradients."""
    body = lambda h, of_layer: (jnp.tanh(h @ of_layer[0] + of_layer[1]), None)
    return mean_square(lax.scan(body, x, (weights(), b))[0], y)


class Block(nnx.Module):
    def __init__(self, rngs):
        like = {"rngs": rngs, "dtype": jnp.float64, "param_dtype": jnp.float64}
        self.norm = nnx.LayerNorm(WIDTH, **like)
        self.linear = nnx.Linear(WIDTH, WIDTH, **like)

    def __call__(self, x):
        return x + jnp.tanh(self.linear(self.norm(x)))


def of_nnx():
    """A step and its parameters, of layers under `nnx.scan`."""
    make = nnx.vmap(Block, in_axes=0, out_axes=0)
    blocks = nnx.split_rngs(splits=LAYERS)(make)(nnx.Rngs(0))
    form, params = nnx.split(blocks)

    def loss(params, x, y):
        through = nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        apply = through(lambda x, block: block(x))
        return mean_square(apply(x, nnx.merge(form, params)), y)

    return descent(loss), params


STEPS = {
    "scan": lambda: (descent(scanned), weights()),
    "remat in scan": lambda: (descent(rematerialised), weights()),
    "written out": lambda: (descent(written_out), weights()),
    "mapped": lambda: (descent(mapped), weights()),
    "without jax.grad": lambda: (own_derivative, weights()),
    "nnx.scan": of_nnx,
    "one vector": lambda: (
        one_vector,
        {"layers": weights(), "head": normal(3, WIDTH, WIDTH)},
    ),
    "biases": lambda: (descent(biases), normal(0, LAYERS, WIDTH)),
}


@pytest.mark.parametrize("name", some_fast(STEPS, "scan", "without jax.grad", "mapped"))
def test_gradients_are_found_by_what_they_are(name):
    step, params = STEPS[name]()
    args = params, *data()
    done = rewritten(step, args, MicroBatches(PARTS))
    (loop,) = batch_loops(done)
    assert loop.params["length"] == PARTS
    check_values(step, args, done, steps=3)


def adapted(frozen, x, y):
    """Adapters beside frozen weights, which are arguments too."""

    def loss(params):
        h = x
        for w, a, b in zip(frozen, params["a"], params["b"], strict=True):
            h = jnp.tanh(h @ w + h @ a @ b)
        return mean_square(h, y)

    return loss


@pytest.mark.parametrize("size", some_fast([BATCH, 2 * BATCH], BATCH))
def test_frozen_weights_are_no_examples(size):
    """Weights that are as long as the batch are told from it as well."""
    assert BATCH == WIDTH
    frozen = [normal(k, WIDTH, WIDTH) for k in range(LAYERS)]
    params = {"a": normal(3, LAYERS, WIDTH, 2), "b": normal(4, LAYERS, 2, WIDTH)}
    step = descent(lambda params, frozen, x, y: adapted(frozen, x, y)(params))
    args = params, frozen, *data(size)
    done = rewritten(step, args, MicroBatches(PARTS))
    assert len(batch_loops(done)) == 1
    check_values(step, args, done)


def test_sums_of_other_shapes_are_no_gradients():
    """The rows of a frozen matrix are no examples: a product sums over them."""

    def step(params, frozen, x):
        h = jnp.tanh(x @ frozen)
        return params - RATE * jax.grad(lambda b: (h * b).mean())(params), h.mean()

    args = normal(0, WIDTH), normal(1, 4 * WIDTH, WIDTH), normal(2, 3, 4 * WIDTH)
    done = rewritten(step, args, MicroBatches(PARTS))
    assert not batch_loops(done)
    (note,) = [note for note in done.notes if "micro-batches" in note]
    assert "no gradient is a sum over it" in note


def accumulated(w, x, y):
    """The micro-batches of a user's own loop."""

    def body(sums, xy):
        return jax.tree.map(jnp.add, sums, jax.value_and_grad(scanned)(w, *xy)), None

    value, g = lax.scan(body, (jnp.zeros(()), jnp.zeros_like(w)), (x, y))[0]
    return w - RATE * g, value


def test_a_loop_over_micro_batches_is_not_cut_into_shorter_ones():
    x, y = (jnp.stack([z] * 2 * PARTS) for z in data())
    done = rewritten(accumulated, (weights(), x, y), MicroBatches(PARTS))
    assert not batch_loops(done)
    (note,) = [note for note in done.notes if "micro-batches" in note]
    assert "nothing that it makes would be smaller" in note


# -- where examples meet


def batch_statistics(w, x, y):
    def body(h, w):
        h = h @ w
        return (h - h.mean((0, 1))) * lax.rsqrt(h.var((0, 1)) + 1e-5), None

    return mean_square(lax.scan(body, x, w)[0], y)


def contrastive(w, x, y):
    a, b = (lax.scan(layer, z.mean(1), w)[0] for z in (x, y))
    logits = a @ b.T
    both = jax.nn.log_softmax(logits), jax.nn.log_softmax(logits.T)
    return -sum(jnp.diag(one).mean() for one in both)


def balanced_experts(w, x, y):
    def body(carry, w):
        h, balance = carry
        share = jax.nn.softmax(h @ w)
        first = jax.nn.one_hot(jnp.argmax(share, -1), WIDTH, dtype=h.dtype)
        balance += (share.mean((0, 1)) * first.mean((0, 1))).sum()
        return (h + (share * first) @ w, balance), None

    (h, balance), _ = lax.scan(body, (x, jnp.zeros(())), w)
    return mean_square(h, y) + balance


def weighted_by_activations(w, x, y):
    h = lax.scan(layer, x, w)[0]
    weight = jax.nn.sigmoid(h[..., :1])
    return ((h - y) ** 2 * weight).sum() / weight.sum()


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (batch_statistics, "`sub`"),
        (contrastive, "`dot_general`"),
        (balanced_experts, "`mul`"),
        (weighted_by_activations, "`reduce_sum`"),
    ],
)
def test_the_plan_names_where_examples_meet(loss, operation):
    done = rewritten(descent(loss), (weights(), *data()), MicroBatches(PARTS))
    assert not batch_loops(done) and not done.description.tiles
    (note,) = [note for note in done.notes if "micro-batches" in note]
    assert f"examples meet in {operation} at " in note
    assert f"({loss.__name__}" in note


class NormedConv(nn.Module):
    """A module whose statistics are those of the batch it trains on."""

    @nn.compact
    def __call__(self, x):
        like = {"dtype": jnp.float64, "param_dtype": jnp.float64}
        x = nn.Conv(WIDTH, (3,), **like)(x)
        x = nn.relu(nn.BatchNorm(use_running_average=False, **like)(x))
        return nn.Dense(WIDTH, **like)(x)


def test_a_batch_norm_in_training_is_named_by_its_module():
    model, (x, y) = NormedConv(), data()
    variables = model.init(jax.random.key(0), x)

    def step(variables, x, y):
        def loss(params):
            own = {**variables, "params": params}
            out, new = model.apply(own, x, mutable=["batch_stats"])
            return mean_square(out, y), new

        (value, new), grads = jax.value_and_grad(loss, has_aux=True)(
            variables["params"]
        )
        descend = lambda w, g: w - RATE * g
        params = jax.tree.map(descend, variables["params"], grads)
        return {"params": params, **new}, value

    done = rewritten(step, (variables, x, y), MicroBatches(PARTS))
    assert not batch_loops(done)
    (note,) = [note for note in done.notes if "micro-batches" in note]
    assert "examples meet in `reduce_sum` at " in note and "BatchNorm_0" in note


def clipped(w, x, y):
    """The norm of the gradients is known after the sums."""
    value, g = jax.value_and_grad(scanned)(w, x, y)
    norm = jnp.linalg.norm(g)
    return w - RATE * g / jnp.maximum(1, norm), value, norm


def masked(w, x, y):
    """The count is of labels alone, and known before."""
    h = lax.scan(layer, x, w)[0]
    mask = y[..., :1] > 0
    return ((h - y) ** 2 * mask).sum() / jnp.maximum(mask.sum(), 1)


def frozen_statistics(w, x, y):
    """Batch norm as it is in evaluation."""
    mean, scale = normal(8, WIDTH), lax.rsqrt(normal(9, WIDTH) ** 2 + 1)
    body = lambda h, w: (jnp.tanh((h @ w - mean) * scale), None)
    return mean_square(lax.scan(body, x, w)[0], y)


@pytest.mark.parametrize(
    "step", [clipped, descent(masked), descent(frozen_statistics)],
    ids=["clipping", "masked count", "frozen statistics"],
)  # fmt: skip
def test_sums_before_and_behind_the_examples_are_no_obstacle(step):
    args = weights(), *data()
    done = rewritten(step, args, MicroBatches(PARTS))
    assert len(batch_loops(done)) == 1
    check_values(step, args, done)


# -- the row of the plan


def test_the_row_says_the_whole_step_its_bytes_and_its_price():
    args = weights(), *data()
    step = descent(scanned)
    row_of = lambda n: rewritten(step, args, MicroBatches(n), target="h100")
    two, four = (row_of(n).description.tiles[0] for n in (2, 4))
    assert (four.path, four.axis, four.n, four.times) == (
        "the whole step",
        "batch",
        4,
        1,
    )
    assert four.shape == (LAYERS, BATCH, LENGTH, WIDTH)  # residuals of all layers
    assert four.bytes_before == two.bytes_before > two.bytes_after > four.bytes_after
    # residuals are halved; gradients are not
    residuals = LAYERS * BATCH * LENGTH * WIDTH * 8
    assert two.bytes >= residuals / 2
    assert four.seconds > two.seconds > 0


def test_the_price_is_that_of_weights_and_sums():
    """A part reads the weight once, and reads and writes the sum of its gradient."""
    size, n = 16384, 8
    like = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.float32)
    args = like(size, size), like(BATCH, size), like(BATCH, size)
    step = descent(lambda w, x, y: mean_square(x @ w, y))
    (row,) = rewritten(step, args, MicroBatches(n), target="h100").description.tiles
    weight = 4 * size**2
    # once each is what the step takes without parts
    more = (n - 1) * weight + (2 * n - 1) * weight
    # examples, and the starts of kernels, are small beside it
    seconds = more / rates_of("h100").bandwidth
    assert seconds <= row.seconds <= 1.05 * seconds


@pytest.mark.slow
def test_the_row_is_printed_and_kept(tmp_path):
    args = weights(), *data()
    step = descent(scanned)
    plain = schedule(step, target="cpu", donate_argnums=0).plan(*args)
    choice = Choice("cpu", (MicroBatches(PARTS),))
    asked = dataclasses.replace(plain, choice=choice)
    scheduled = schedule(step, plan=asked, donate_argnums=0)
    plan = scheduled.plan(*args, target="cpu")
    (row,) = plan.tiles
    assert "the whole step" in str(plan) and f"{PARTS} over batch" in str(plan)
    assert f"in {PARTS} micro-batches" in str(plan)
    assert Plan.from_json(plan.to_json()) == plan
    assert plan.scheduled.temp_bytes < plan.plain.temp_bytes
    plan.plot(tmp_path / "plan.svg")
    assert "the whole step" in (tmp_path / "plan.svg").read_text()


@pytest.mark.slow
def test_tangents_of_a_hessian_are_examples():
    """`jax.jacfwd` stacks them along the last axis, as what they are compared with."""

    def energy(params, x):
        h = jnp.tanh((x[:, None] - x) ** 2 * params["w"] + params["b"])
        return jnp.sum(h * params["w"])

    def loss(params, x, y):
        hessian = jax.jacfwd(jax.grad(lambda x: energy(params, x)))(x)
        return jnp.mean((hessian - y) ** 2)

    def step(params, x, y):
        value, grads = jax.value_and_grad(loss)(params, x, y)
        return jax.tree.map(lambda w, g: w - RATE * g, params, grads), value

    params = {"w": normal(0, 1, 1), "b": normal(1, 1, 2 * BATCH)}
    args = params, normal(2, 2 * BATCH), normal(3, 2 * BATCH, 2 * BATCH)
    done = rewritten(step, args, MicroBatches(PARTS))
    assert len(batch_loops(done)) == 1
    check_values(step, args, done)
