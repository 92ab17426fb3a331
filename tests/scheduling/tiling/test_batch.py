"""Micro-batches found in a step that has none."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxmem
from jaxmem.ir import jaxprs
from jaxmem.scheduling import _passes
from jaxmem.scheduling._choice import NO_CHOICE
from jaxmem.scheduling.tiling.batch_loop import is_batch_loop
from jaxmem.scheduling.tiling.micro_batches import MicroBatches

LAYERS, WIDTH, WORDS, BATCH, LENGTH = 3, 8, 16, 8, 6
RATE, EPSILON, STEPS = 1e-2, 1e-8, 3  # of Adam
TX = optax.adam(RATE, eps=EPSILON)


@pytest.fixture(autouse=True)
def as_users_write_it():
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def init(dtype=None):
    keys = jax.random.split(jax.random.key(0), 3)
    normal = lambda key, *shape: jax.random.normal(key, shape, dtype) / 2
    return {
        "words": normal(keys[0], WORDS, WIDTH),
        "up": normal(keys[1], LAYERS, WIDTH, 4 * WIDTH),
        "down": normal(keys[2], LAYERS, 4 * WIDTH, WIDTH),
        "scale": jnp.ones(WIDTH, dtype),  # of all layers
    }


def batch(size: int = BATCH):
    make = lambda seed: jax.random.randint(
        jax.random.key(seed), (size, LENGTH), 0, WORDS
    )
    return make(1), make(2)


def logits_of(params, tokens, key, *, scanned=True, dropout=0.0, between=lambda h: h):
    def layer(h, of_layer):
        up, down, key = of_layer
        new = jax.nn.gelu(h @ up) @ down
        if dropout:
            keep = jax.random.bernoulli(key, 1 - dropout, new.shape)
            new = jnp.where(keep, new / (1 - dropout), 0)
        return h + between(new) * params["scale"], None

    h = params["words"][tokens]
    stacks = params["up"], params["down"], jax.random.split(key, LAYERS)
    if scanned:
        h, _ = jax.lax.scan(layer, h, stacks)
    else:
        for i in range(LAYERS):
            h, _ = layer(h, [x[i] for x in stacks])
    return h @ params["words"].T


def mean_loss(params, tokens, labels, key, masked=False, **model):
    logits = logits_of(params, tokens, key, **model)
    entropy = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    if not masked:
        return entropy.mean()
    mask = (labels > 3).astype(entropy.dtype)
    return (entropy * mask).sum() / jnp.maximum(mask.sum(), 1)


def step_of(loss):
    def step(params, state, tokens, labels, key):
        value, grads = jax.value_and_grad(loss)(params, tokens, labels, key)
        updates, state = TX.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return step


def rewritten(step, args, n: int):
    """The step in `n` micro-batches, as `Rewritten` and as a function."""
    closed = jax.make_jaxpr(step)(*args)
    given = len(jax.tree.leaves(args[:2]))  # parameters and moments are donated
    choice = NO_CHOICE.having(MicroBatches(n))
    done = _passes.rewrite(closed, {i: i for i in range(given)}, None, choice)
    tree = jax.tree.structure(jax.eval_shape(step, *args))

    def run(*args):
        outs = jaxprs.evaluate(done.jaxpr, jax.tree.leaves(args))
        return jax.tree.unflatten(tree, outs)

    return done, run


def loops(done) -> list:
    return [e for e in jaxprs.split(done.jaxpr)[0].eqns if is_batch_loop(e)]


@pytest.mark.parametrize(
    "scanned",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["scanned", "written out"],
)
@pytest.mark.parametrize(
    "model", [{}, {"masked": True, "dropout": 0.25}], ids=["mean", "masked, dropout"]
)
def test_steps_are_those_of_the_whole_batch(scanned, model):
    with jax.enable_x64(True):
        params = init(jnp.float64)
        loss = lambda *args: mean_loss(*args, scanned=scanned, **model)
        step, carry = step_of(loss), (params, TX.init(params))
        more = *batch(), jax.random.key(3)
        done, tiled = rewritten(step, (*carry, *more), 4)
        assert len(loops(done)) == 1
        (loop,) = loops(done)
        assert loop.params["length"] == 4
        step, tiled = jax.jit(step), jax.jit(tiled)
        want = got = carry
        for _ in range(STEPS):
            *want, value = step(*want, *more)
            *got, other = tiled(*got, *more)
            # Gradients are sums of `terms` numbers below 1: in another order they
            # differ by at most terms x rounding, and Adam's quotient by 1/epsilon of it
            terms = BATCH * LENGTH * WORDS
            error = STEPS * RATE * terms * np.finfo(np.float64).eps / EPSILON
            np.testing.assert_allclose(other, value, atol=error)
            for a, b in zip(*map(jax.tree.leaves, (want[0], got[0])), strict=True):
                np.testing.assert_allclose(a, b, atol=error)


def test_narrow_gradients_are_added_in_float32():
    params = init(jnp.bfloat16)
    args = params, TX.init(params), *batch(), jax.random.key(3)
    (loop,) = loops(rewritten(step_of(mean_loss), args, 8)[0])
    narrow = [v for v in loop.outvars if v.aval.dtype == jnp.bfloat16]
    assert not narrow


def test_a_mask_of_labels_is_counted_before_the_loop():
    params = init()
    args = params, TX.init(params), *batch(), jax.random.key(3)
    done, _ = rewritten(step_of(lambda *a: mean_loss(*a, masked=True)), args, 4)
    (loop,) = loops(done)
    assert done.notes and "4 micro-batches" in done.notes[0]
    scalars = [v for v in loop.invars if getattr(v.aval, "shape", None) == ()]
    assert scalars  # the count, which every part divides by


def test_a_counter_of_the_layers_is_advanced_once():
    """As nnx counts random numbers in scanned layers: no example has part in it."""

    def step(params, counts, x):
        def loss(up):
            layer = lambda x, w: (x + jnp.tanh(x @ w[0]), w[1] + 1)
            x_new, counted = jax.lax.scan(layer, x, (up, counts))
            return jnp.square(x_new).mean(), counted

        (value, counted), grads = jax.value_and_grad(loss, has_aux=True)(params)
        return params - RATE * grads, counted, value

    up = jax.random.normal(jax.random.key(0), (LAYERS, WIDTH, WIDTH))
    args = up, jnp.arange(LAYERS), jax.random.normal(jax.random.key(1), (BATCH, WIDTH))
    done, run = rewritten(step, args, 4)
    want, got = jax.jit(step)(*args), jax.jit(run)(*args)
    np.testing.assert_array_equal(got[1], want[1])
    np.testing.assert_allclose(got[0], want[0], rtol=1e-5)
    (loop,) = loops(done)
    beside = [e for e in jaxprs.split(done.jaxpr)[0].eqns if e is not loop]
    assert not any(e.primitive.name == "dot_general" for e in walk_all(beside))


def walk_all(eqns):
    """Equations and those in their bodies."""
    for eqn in eqns:
        yield eqn
        for body in jaxprs.bodies(eqn):
            yield from jaxprs.walk(body)


def contrastive(params, tokens, labels, key):
    x = logits_of(params, tokens, key).mean(1)
    return -jnp.diag(jax.nn.log_softmax(x @ x.T)).mean()


def balanced(params, tokens, labels, key):
    logits = logits_of(params, tokens, key)
    share = jax.nn.softmax(logits).mean((0, 1))
    return (share**2).sum() + logits.mean()


def statistics(params, tokens, labels, key):
    normed = lambda h: (h - h.mean((0, 1))) / h.std((0, 1))
    return mean_loss(params, tokens, labels, key, between=normed)


@pytest.mark.parametrize(
    ("loss", "operation"),
    [
        (contrastive, "`dot_general`"),
        (balanced, "`reduce_sum`"),
        (statistics, "`reduce_sum`|`div`|`sub`"),
    ],
)
def test_where_examples_meet_the_operation_and_its_line_are_named(loss, operation):
    params = init()
    args = params, TX.init(params), *batch(), jax.random.key(3)
    done, _ = rewritten(step_of(loss), args, 4)
    assert not loops(done)
    (note,) = [note for note in done.notes if "micro-batches" in note]
    assert "examples meet in" in note and "test_batch.py" in note
    assert any(name in note for name in operation.split("|")), note


def test_a_count_that_does_not_divide_the_batch_is_said():
    params = init()
    args = params, TX.init(params), *batch(), jax.random.key(3)
    done, _ = rewritten(step_of(mean_loss), args, 3)
    assert not loops(done)
    assert any("no argument has an axis that n=3 divides" in n for n in done.notes)


def test_gradients_are_released_as_those_of_microbatch():
    params = init()
    args = params, TX.init(params), *batch(), jax.random.key(3)
    done, _ = rewritten(step_of(mean_loss), args, 4)
    released = done.description.gradients
    assert len(released) == 2 and all(g.released for g in released)


@pytest.mark.slow
@pytest.mark.parametrize("n", [2, 8])
def test_the_peak_is_that_of_microbatch(n):
    params = init()
    rest = *batch(64), jax.random.key(3)
    args = params, TX.init(params), *rest
    loss = lambda params, batch, key: mean_loss(params, *batch, key)
    step = jaxmem.microbatch(loss, TX, n)
    by_hand = jaxmem.estimate(step, *args[:2], rest[:2], rest[2], target="cpu")
    tiled = jax.jit(rewritten(step_of(mean_loss), args, n)[1], donate_argnums=(0, 1))
    found = jaxmem.estimate(tiled, *args, target="cpu")
    assert found.peak_bytes <= 1.05 * by_hand.peak_bytes
