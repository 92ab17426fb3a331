"""What a report says to do: found in the step at hand, and held to its bytes."""

import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxmem
from jaxmem import rewriting
from jaxmem.advising import remedies_for
from jaxmem.frameworks import pure_call
from jaxmem.ir import jaxprs
from jaxmem.memory.compile.call import flatten_call
from jaxmem.memory.compile.lower import flat_function, trace
from jaxmem.memory.report.advice import AdvisedStep
from jaxmem.scheduling import predict
from tests.programs import PROGRAMS

S = jax.ShapeDtypeStruct
F32 = jnp.float32
# What is expected of the compiled peak: XLA fuses and lays out what is predicted from a
# graph, which `python -m benchmarks.predict` measures.
FAR = 1.25


def remedies(step, *args, donate=(), target="h100"):
    """What is found in a step, its predicted peak in the place of the compiled one."""
    places = tuple(donate)
    found = predict(step, *args, target=target, donate_argnums=places)
    with pure_call(step, args, {}, None, ()) as pure:
        call = flatten_call(step, pure)
        closed = trace(flat_function(lambda: step, call), call).jaxpr
    counts = [len(jax.tree.leaves(a)) for a in args]
    starts = [sum(counts[:i]) for i in range(len(args))]
    donated = tuple(s + k for i in places for s in [starts[i]] for k in range(counts[i]))
    specs = tuple(leaf.spec for leaf in call.leaves)
    sizes = found.peak_bytes, found.argument_bytes
    return remedies_for(AdvisedStep(closed, donated, specs, target, *sizes))


def named(found):
    return [re.split(r"[(,]", one.call)[0].removeprefix("jaxmem.") for one in found]


def gru(p, x):
    width = p["h"].shape[0]

    def cell(h, x):
        gates = x @ p["x"][:, : 2 * width] + h @ p["h"][:, : 2 * width]
        z, r = jnp.split(jax.nn.sigmoid(gates), 2, -1)
        n = jnp.tanh(x @ p["x"][:, 2 * width :] + (r * h) @ p["h"][:, 2 * width :])
        return (1 - z) * n + z * h, None

    first = jnp.zeros((x.shape[1], width))
    return jnp.square(jax.lax.scan(cell, first, x)[0]).mean()


def pairs(k, x):
    """Forces between all pairs of particles, through a tanh."""

    def iteration(state, _):
        x, v = state
        d = x[:, :, None] - x[:, None]
        r = jnp.sqrt(jnp.square(d).sum(-1) + 1e-2)
        v = v - k * (d * (jnp.tanh(r - 1.0) / r)[..., None]).sum(2)
        return (x + 0.02 * v, v), None

    start = x, jnp.zeros_like(x)
    return jnp.square(jax.lax.scan(iteration, start, None, length=16)[0][0]).mean()


def waves(n, u):
    """A complex exponential of square arrays, which is no softmax."""

    def iteration(u, s):
        return jnp.fft.ifft2(jnp.fft.fft2(u) * jnp.exp(1j * n * s)), None

    steps = jnp.linspace(0.1, 0.5, 12)
    return jnp.square(jnp.abs(jax.lax.scan(iteration, u, steps)[0])).mean()


RECURRENT = {
    "gru": (gru, {"x": S((16, 192), F32), "h": S((64, 192), F32)}, S((64, 8, 16), F32)),
    "pairs": (pairs, S((), F32), S((8, 16, 3), F32)),
    "waves": (waves, S((1, 64, 64), F32), S((2, 64, 64), jnp.complex64)),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_schedule_is_named_where_substitute_does_nothing(name):
    loss, *args = RECURRENT[name]
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        found = remedies(lambda *a: jax.value_and_grad(loss)(*a), *args)
    assert "substitute" not in named(found) and "schedule" in named(found)


def transformer(x, project, dropout):
    """A layer of attention and a gelu, on functions that project and drop."""
    q, k, v = (project(x, 64).reshape(*x.shape[:2], 4, 16) for _ in range(3))
    w = jax.nn.softmax(jnp.einsum("btnd,bsnd->bnts", q, k) / 4.0, axis=-1)
    y = jnp.einsum("bnts,bsnd->btnd", dropout(w), v).reshape(x.shape)
    return x + project(jax.nn.gelu(project(x + y, 256)), 64)


class OfLinen(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            dropout = nn.Dropout(0.1, deterministic=False)
            x = transformer(x, lambda x, n: nn.Dense(n)(x), dropout)
        return x


def linen_step(model, only_gradients):
    keys = {"dropout": jax.random.key(0), "params": jax.random.key(1)}
    x = S((4, 128, 64), F32)
    params = jax.eval_shape(OfLinen().init, keys, x)

    def loss(params, x):
        return jnp.square(model.apply(params, x, rngs={"dropout": keys["dropout"]})).sum()

    def step(params, x):
        if only_gradients:
            return jax.grad(loss)(params, x)
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step, params, x


@pytest.mark.parametrize("only_gradients", [False, True])
def test_substitute_is_named_until_it_is_done(only_gradients):
    plain = remedies(*linen_step(OfLinen(), only_gradients))
    (one,) = [r for r in plain if r.call == "jaxmem.substitute"]
    assert "dot_product_attention" in one.why and "gelu" in one.why
    lean = remedies(*linen_step(jaxmem.substitute(OfLinen()), only_gradients))
    assert "substitute" not in named(lean)


def test_micro_batches_by_hand_are_looked_into():
    step, params, x = linen_step(OfLinen(), False)

    def accumulated(params, x):
        def micro_batch(total, x):
            new, value = step(params, x)
            return jax.tree.map(jnp.add, total, new), value

        zeros = jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), params)
        return jax.lax.scan(micro_batch, zeros, x)

    found = remedies(accumulated, params, S((4, *x.shape), x.dtype))
    assert "substitute" in named(found)


@pytest.fixture
def differentiated(monkeypatch):
    """Whether the rewriter finds something in a function that a step differentiates."""
    found = []

    def listening(transform):
        def differentiate(fn, *how, **options):
            lean = jaxmem.substitute(fn)

            def listened(*args, **kwargs):
                try:
                    found.append(rewriting.find(fn, *args, **kwargs).counts)
                except TypeError:  # an object of nnx
                    found.append({"unknown": 1})
                return fn(*args, **kwargs)

            del lean
            return transform(listened, *how, **options)

        return differentiate

    for module, name in ((jax, "grad"), (jax, "value_and_grad"), (jax, "vjp")):
        monkeypatch.setattr(module, name, listening(getattr(module, name)))
    return found
