"""Layers that are written out, against `eqx.filter_checkpoint` round each of them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem import schedule
from jaxmem.cost.equations import flops
from jaxmem.scheduling import BudgetError
from jaxmem.scheduling.predict.written_out import written_out

LAYERS, WIDTH, HEADS, LENGTH, BATCH, WORDS = 4, 64, 4, 128, 4, 64

pytestmark = pytest.mark.slow


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    norms: list[eqx.nn.LayerNorm]
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        a, b, c = jax.random.split(key, 3)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=a)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.up = eqx.nn.Linear(WIDTH, 4 * WIDTH, key=b)
        self.down = eqx.nn.Linear(4 * WIDTH, WIDTH, key=c)

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        mask = jnp.tril(jnp.ones((LENGTH, LENGTH), bool))
        x = x + self.attention(h, h, h, mask=mask)
        h = jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x)))
        return x + jax.vmap(self.down)(h)


class Model(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        first, last, *keys = jax.random.split(key, LAYERS + 2)
        self.embedding = eqx.nn.Embedding(WORDS, WIDTH, key=first)
        self.blocks = [Block(k) for k in keys]
        self.head = eqx.nn.Linear(WIDTH, WORDS, key=last)

    def __call__(self, tokens, around):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = around(block)(x)
        return jax.vmap(self.head)(x)


def step_and_args(around=lambda block: block):
    """A clipped AdamW step, and the shapes of its arguments."""
    model = eqx.filter_eval_shape(Model, jax.random.key(0))
    params, rest = eqx.partition(model, lambda a: isinstance(a, jax.ShapeDtypeStruct))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))

    def loss(params, tokens):
        model = eqx.combine(params, rest)
        logits = jax.vmap(lambda t: model(t, around))(tokens[:, :-1])
        cross_entropy = optax.softmax_cross_entropy_with_integer_labels
        return cross_entropy(logits, tokens[:, 1:]).mean()

    def step(params, state, tokens):
        value, gradients = jax.value_and_grad(loss)(params, tokens)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    tokens = jax.ShapeDtypeStruct((BATCH, LENGTH + 1), jnp.int32)
    return step, (params, jax.eval_shape(optimizer.init, params), tokens)


def flops_of(step, args):
    return sum(map(flops, written_out(jax.make_jaxpr(step)(*args)).eqns))


@pytest.fixture(scope="module", autouse=True)
def own_cache(tmp_path_factory):
    """One for all tests of this file: they search for the same step."""
    # standard promotion: for optax
    with pytest.MonkeyPatch.context() as patch, jax.numpy_dtype_promotion("standard"):
        patch.setenv("JAXMEM_CACHE_DIR", str(tmp_path_factory.mktemp("reports")))
        yield


def test_no_worse_than_a_checkpoint_round_each_layer():
    """As few bytes for no more flops; and any least is no more than these bytes."""
    step, args = step_and_args()
    other, _ = step_and_args(eqx.filter_checkpoint)
    how = {"target": "h100", "donate_argnums": (0, 1)}
    budget = jaxmem.estimate(other, *args, **how).peak_bytes
    plan = schedule(step, budget, **how).plan(*args)
    assert plan.scheduled.peak_bytes <= budget
    recomputed = flops_of(other, args) - flops_of(step, args)
    assert 0 < plan.recomputed_flops <= recomputed

    found = []
    for part in (2, 8):  # a half and an eighth of these bytes: nothing is so small
        with pytest.raises(BudgetError) as error:
            schedule(step, budget // part, **how).plan(*args)
        found.append(error.value.least)
    assert found[0] == found[1] <= plan.scheduled.peak_bytes
