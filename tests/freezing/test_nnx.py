"""Parts of nnx models: by pattern and by filter, functional and in place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem


class Model(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List(
            [nnx.LoRALinear(4, 4, lora_rank=2, rngs=rngs) for _ in range(2)]
        )
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.head = nnx.Linear(4, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = jnp.tanh(layer(x))
        return self.head(self.dropout(x))


@functools.cache
def _made():
    return Model(nnx.Rngs(0))


def model():
    """A new one, equal to the others."""
    return nnx.clone(_made())


def loss(model, x, rng=None):
    return jnp.mean(jnp.square(model(x) - 1))


X = jax.random.normal(jax.random.key(1), (8, 4))
LORA = [f"layers/{i}/lora/lora_{name}" for i in (0, 1) for name in "ab"]
MASKS = {
    "pattern": ("**/lora", LORA),
    "type": (nnx.LoRAParam, LORA),
    "several": ([nnx.LoRAParam, "head/bias"], ["head/bias", *LORA]),
    "filter": (
        nnx.All(nnx.Param, nnx.PathContains("head")),
        ["head/bias", "head/kernel"],
    ),
    "function": (lambda path, value: path[-1] == "bias", None),
}


@pytest.mark.parametrize("name", MASKS)
def test_selects(name):
    mask, want = MASKS[name]
    part = jaxmem.trainable(model(), mask)
    want = want or ["head/bias", "layers/0/bias", "layers/1/bias"]
    assert sorted(part.sizes.trained) == sorted(want)
    merged = part.frozen.merge(part.params)
    jax.tree.map(np.testing.assert_array_equal, *map(values, (merged, model())))


def values(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def by_flax(wrt, steps=2):
    one, tx = model(), optax.adam(1e-2)
    optimizer = nnx.Optimizer(one, tx, wrt=wrt)

    @nnx.jit
    def step(one, optimizer):
        _, grads = nnx.value_and_grad(loss, argnums=nnx.DiffState(0, wrt))(one, X)
        optimizer.update(one, grads)

    for _ in range(steps):
        step(one, optimizer)
    return values(one), optimizer


def assert_close(got, want):
    # the same operations, fused in another order
    close = lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-6)
    jax.tree.map(close, got, want)


def test_the_filter_serves_flax():
    part = jaxmem.trainable(model(), "**/lora")
    got, optimizer = by_flax(part.filter)
    want, _ = by_flax(nnx.LoRAParam)
    assert_close(got, want)
    moments = [x for x in jax.tree.leaves(nnx.state(optimizer.opt_state)) if x.ndim]
    assert len(moments) == 2 * len(LORA)
    assert hash(part.filter) == hash(jaxmem.trainable(model(), nnx.LoRAParam).filter)


def test_functional_steps():
    """The dropout key of the first step: the state that the loss leaves is lost."""
    trained, frozen = jaxmem.trainable(model(), nnx.LoRAParam)
    tx = optax.adam(1e-2)

    @jax.jit
    def step(trained, state, frozen):
        _, grads = jaxmem.value_and_grad(loss)(trained, frozen, X)
        updates, state = tx.update(grads, state, trained)
        return optax.apply_updates(trained, updates), state

    got, _ = step(trained, tx.init(trained), frozen)
    want, _ = by_flax(nnx.LoRAParam, steps=1)
    assert_close(values(frozen.merge(got)), want)


def test_under_microbatch():
    one, tx = model(), jaxmem.adama(1e-2)
    before = jax.tree.map(np.asarray, values(one))
    wrt = jaxmem.trainable(one, "**/lora").filter
    optimizer = nnx.Optimizer(one, tx, wrt=wrt)
    step = jaxmem.microbatch(loss, tx, 2)
    for _ in range(2):  # lora_a has no gradient while lora_b is zero
        step(one, optimizer, X, None)
    after = values(one)
    changed = jax.tree.map(lambda a, b: not np.array_equal(a, b), before, after)
    flat = {
        "/".join(map(str, k)): v
        for k, v in nnx.traversals.flatten_mapping(changed).items()
    }
    assert sorted(path for path, moved in flat.items() if moved) == LORA


BAD = [
    ("lora", ValueError, r"'\*\*/lora' would match"),
    ("**/count", ValueError, "has no gradient"),
    (nnx.BatchStat, ValueError, "selects none"),
    (3, TypeError, "mask=3"),
]


@pytest.mark.parametrize("mask,error,message", BAD, ids=[m for *_, m in BAD])
def test_bad_masks(mask, error, message):
    with pytest.raises(error, match=message):
        jaxmem.trainable(model(), mask)


def test_no_filter_of_plain_trees():
    with pytest.raises(TypeError, match="not the parameters of an nnx.Module"):
        jaxmem.trainable({"w": jnp.ones(2)}, "w").filter  # noqa: B018


class Quantized(nnx.Module):
    """A kernel of few bits, with the names of qwix's Variables."""

    def __init__(self):
        self.qvalue = nnx.Param(jnp.zeros((4, 4), jnp.int8))
        self.scale = nnx.Param(jnp.ones((1, 4)))


def test_scales_of_quantised_weights_are_not_trained():
    layer = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    layer.kernel = Quantized()
    part = jaxmem.trainable(layer, nnx.Param)
    assert part.sizes.trained == ("bias",)
    assert part.sizes.quantized_bytes == 16 + 16
