"""Micro-batches together with tiles, recomputation and gradient release."""

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.scheduling.recompute.residuals import Recompute
from jaxmem.scheduling.tiling.micro_batches import MicroBatches
from jaxmem.scheduling.tiling.tiles import Tiles
from tests.scheduling.tiling.whole_steps import batch_loops, check_values, rewritten

LAYERS, PARTS = 3, 4
SDS = jax.ShapeDtypeStruct
EVERYTHING = 1e9  # seconds a byte: whatever can be recomputed is


def shapes(width: int, words: int):
    return {
        "words": (words, width),
        "qkv": (LAYERS, width, 3 * width),
        "up": (LAYERS, width, 4 * width),
        "down": (LAYERS, 4 * width, width),
    }


def loss_of(params, batch):
    """Layers with attention and an MLP in a scan, tied words, a masked mean."""
    tokens, labels = batch

    def layer(x, w):
        q, k, v = jnp.split(x @ w["qkv"], 3, -1)
        scores = jax.nn.softmax(jnp.einsum("bsd,btd->bst", q, k) / 8)
        x = x + jnp.einsum("bst,btd->bsd", scores, v)
        return x + jax.nn.gelu(x @ w["up"]) @ w["down"], None

    layers = {name: w for name, w in params.items() if name != "words"}
    x, _ = jax.lax.scan(layer, params["words"][tokens], layers)
    logits = x @ params["words"].T
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    mask = (labels > 1).astype(losses.dtype)
    return (losses * mask).sum() / mask.sum()


def step_of(tx):
    def step(state, batch):
        params, inner = state
        loss, grads = jax.value_and_grad(loss_of)(params, batch)
        updates, inner = tx.update(grads, inner, params)
        return (optax.apply_updates(params, updates), inner), loss

    return step


@pytest.mark.usefixtures("x64", "standard_jax")
def test_values_and_gradient_release():
    tx, width, words = optax.sgd(0.1, momentum=0.9), 8, 16
    keys = iter(jax.random.split(jax.random.key(0), 6))
    normal = lambda shape: jax.random.normal(next(keys), shape, jnp.float64) / 4
    params = {name: normal(shape) for name, shape in shapes(width, words).items()}
    draw = lambda: jax.random.randint(next(keys), (8, 6), 0, words)
    args = (params, tx.init(params)), (draw(), draw())
    step = step_of(tx)
    others = Tiles(limit=0, n=2), Recompute(EVERYTHING)
    done = rewritten(step, args, MicroBatches(PARTS), *others)
    assert len(batch_loops(done)) == 1
    assert all(map(done.did, (MicroBatches, Tiles, Recompute)))
    gradients = done.description.gradients
    stacked = {shape for shape in map(jnp.shape, params.values()) if len(shape) == 3}
    assert stacked <= {g.shape for g in gradients}
    assert all(g.released for g in gradients)
    check_values(step, args, done, steps=3)


def peaks(target: str, *configs) -> list[int]:
    """Of the step that was found, and of `jaxmem.microbatch`, both after the passes."""
    tx = optax.adam(1e-3)
    params = {k: SDS(shape, jnp.float32) for k, shape in shapes(64, 512).items()}
    state = jax.eval_shape(tx.init, params)
    batch = (SDS((32, 32), jnp.int32),) * 2
    by_hand = jaxmem.microbatch(
        lambda params, batch, key: loss_of(params, batch), tx, PARTS
    )

    def written(state, batch):
        *state, loss = by_hand(*state, batch)
        return state, loss

    found = step_of(tx), (MicroBatches(PARTS), *configs)
    args = ([params, state], batch)
    leaves = jax.tree.leaves(args)
    donated = tuple(range(len(jax.tree.leaves(args[0]))))

    def peak(step, configs) -> int:
        done = rewritten(step, args, *configs, target=target)
        run = lambda *leaves: jaxprs.evaluate(done.jaxpr, leaves)
        report = jaxmem.estimate(run, *leaves, target=target, donate_argnums=donated)
        return report.peak_bytes

    return [peak(*found), peak(written, configs)]


@pytest.mark.slow
@pytest.mark.usefixtures("standard_jax")
@pytest.mark.parametrize("target", ["cpu", "h100"])
@pytest.mark.parametrize(
    "configs",
    [(), (Recompute(EVERYTHING),), (Recompute(EVERYTHING), Tiles(limit=0, n=2))],
    ids=["alone", "recomputed", "recomputed, in tiles"],
)
def test_the_peak_is_at_most_that_of_microbatch(target, configs):
    found, by_hand = peaks(target, *configs)
    assert found <= 1.05 * by_hand
