"""Losses that are no means over their examples: which operation is named, and where."""

import logging
import warnings

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import Mesh

import jaxmem
from jaxmem import microbatch
from jaxmem.scheduling.tiling.together import together

MESH = Mesh(jax.devices()[:2], ("data",))
N, B, C = 2, 8, 4
KEYS = jax.random.split(jax.random.key(0), 3)
PARAMS = jax.random.normal(KEYS[0], (C, C))
BATCH = {
    "x": jax.random.normal(KEYS[1], (B, C)),
    "y": jnp.arange(B) % C,
    "on": (jax.random.uniform(KEYS[2], (B,)) > 0.3).astype(jnp.float32),
}


def losses(w, batch):
    return optax.softmax_cross_entropy_with_integer_labels(batch["x"] @ w, batch["y"])


def mean(w, batch, rng):
    return losses(w, batch).mean() + 0.1 * jnp.square(w).sum()


def in_layers(w, batch, rng):
    x, _ = jax.lax.scan(lambda x, _: (jnp.tanh(x @ w), None), batch["x"], None, 3)
    keep = jax.random.bernoulli(jax.random.key(1), 0.9, x.shape)
    return jnp.where(keep, jax.nn.softmax(x), 0.0).mean()


def masked(w, batch, rng):
    return (losses(w, batch) * batch["on"]).sum() / batch["on"].sum()


def contrastive(w, batch, rng):
    x = batch["x"] @ w
    return jax.nn.logsumexp(x @ x.T, axis=-1).mean()


def largest(w, batch, rng):
    return losses(w, batch).max()


def balanced(w, batch, rng):
    p = jax.nn.softmax(batch["x"] @ w)
    chosen = jax.nn.one_hot(p.argmax(-1), C)
    return losses(w, batch).mean() + (p.mean(0) * chosen.mean(0)).sum()


def normed(w, batch, rng):
    x = batch["x"] @ w
    scale = jax.lax.rsqrt(x.var(0, keepdims=True) + 1e-6)
    x = (x - x.mean(0, keepdims=True)) * scale
    return jax.nn.softplus(x).mean()


def normed_layers(w, batch, rng):
    layer = lambda x, _: (jnp.tanh((x - x.mean(0, keepdims=True)) @ w), None)
    return jax.lax.scan(layer, batch["x"], None, 3)[0].mean()


def ordered(w, batch, rng):
    return (jnp.sort(losses(w, batch)) * jnp.arange(B // N)).mean()


def run(loss, mesh=None, **options):
    if mesh is not None:
        options |= {"mesh": mesh, "axis_name": "data"}
    tx = optax.sgd(0.1)
    step = microbatch(loss, tx, N, donate=False, **options)
    return step(PARAMS, tx.init(PARAMS), BATCH, None)


@pytest.mark.fast("mean-mesh1", "in_layers-None")
@pytest.mark.parametrize("mesh", [None, MESH])
@pytest.mark.parametrize("loss", [mean, in_layers])
def test_nothing_is_said_of_a_mean(loss, mesh, caplog):
    with caplog.at_level(logging.INFO, "jaxmem"), warnings.catch_warnings():
        warnings.simplefilter("error")
        run(loss, mesh)
    assert "together" not in caplog.text


@pytest.mark.parametrize(
    ("loss", "named"),
    [
        (masked, "`div` at .*masked.*it needs the sum over all examples"),
        (balanced, "`mul` at .*balanced.*it needs the sum over all examples"),
        (contrastive, "`dot_general` at .*contrastive.*examples meet each other"),
        (largest, "`reduce_max` at .*largest.*no sum over its examples"),
        (normed, "`sub` at .*normed.*an array of some examples meets a sum"),
        (normed_layers, "`sub` at .*an array of some examples meets a sum"),
    ],
)
def test_operations_are_named_with_a_mesh(loss, named):
    with pytest.warns(UserWarning, match=f"one device's part(.|\\n)*{named}"):
        run(loss, MESH)


def test_a_sort_of_examples_is_named():
    closed = jax.make_jaxpr(lambda x: jnp.sort(x, axis=0).sum())(jnp.ones((B, C)))
    (one,) = together(closed, [0], 4)
    assert one.text.startswith("`sort` at ") and not one.of_sums


def test_without_a_mesh_a_quotient_is_a_warning_and_a_norm_a_line_in_the_log(caplog):
    with pytest.warns(UserWarning, match="one of 2 micro-batches(.|\n)*weight_fn="):
        run(masked)
    with caplog.at_level(logging.INFO, "jaxmem"):
        run(normed)
    assert "takes the examples of a batch together" in caplog.text
    assert "weight_fn" not in caplog.text


@pytest.mark.parametrize("mesh", [None, MESH])
def test_weights_answer_for_a_quotient(mesh):
    """And then the step is that of the whole batch."""
    got = run(masked, mesh, weight_fn=lambda batch: batch["on"].sum())[0]
    want = PARAMS - 0.1 * jax.grad(masked)(PARAMS, BATCH, None)
    # a mean of means: rounding of float32 alone
    assert jnp.allclose(got, want, rtol=1e-5, atol=1e-6)


def test_one_micro_batch_on_one_device_is_the_whole_batch():
    tx = optax.sgd(0.1)
    step = microbatch(masked, tx, 1, donate=False)
    step(PARAMS, tx.init(PARAMS), BATCH, None)


def test_batch_norm_of_flax_is_named_by_its_module():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            return nn.BatchNorm(use_running_average=False)(nn.Dense(C)(x))

    model, x = Model(), BATCH["x"]
    variables = jax.eval_shape(model.init, jax.random.key(0), x)
    apply = lambda v, x: model.apply(v, x, mutable=["batch_stats"])[0].std()
    closed = jax.make_jaxpr(apply)(variables, x)
    given = [len(jax.tree.leaves(variables))]
    found = together(closed, given, B)
    assert any("in Model/BatchNorm_0" in one.text for one in found)
    assert not any(one.of_sums for one in found)


def test_substituted_modules_take_examples_one_by_one():
    class Model(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.gelu(nn.Dense(16)(nn.LayerNorm()(x)))
            return nn.Dense(C)(nn.Dropout(0.1, deterministic=False)(x))

    model = jaxmem.substitute(Model())
    x, key = BATCH["x"], jax.random.key(0)
    rngs = {"params": key, "dropout": key}
    variables = jax.eval_shape(model.init, rngs, x)
    apply = lambda v, x, key: model.apply(v, x, rngs={"dropout": key}).mean()
    closed = jax.make_jaxpr(apply)(variables, x, key)
    assert together(closed, [len(jax.tree.leaves(variables))], B) == ()
