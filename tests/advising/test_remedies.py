"""What a report says to do: found in the step at hand, and held to its bytes."""

import pickle
import re

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest

import jaxmem
from jaxmem import _adviser, rewriting
from jaxmem._bytes import parse_bytes
from jaxmem.advising import remedies_for
from jaxmem.frameworks import pure_call
from jaxmem.ir import jaxprs
from jaxmem.ir.jaxprs import is_array
from jaxmem.memory.compile.call import flatten_call
from jaxmem.memory.compile.lower import flat_function, trace
from jaxmem.memory.report.advice import AdvisedStep
from jaxmem.scheduling import predict
from tests.programs import PROGRAMS, sum_of_matrices
from tests.sets import some_fast

S = jax.ShapeDtypeStruct
F32 = jnp.float32
# What is expected of the compiled peak: XLA fuses and lays out what is predicted from a
# graph, which `python -m benchmarks.predict` measures.
FAR = 1.25


@pytest.fixture(autouse=True)
def usual_promotion():
    """As the programs are written."""
    with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
        yield


def remedies(step, *args, donate=(), target="h100"):
    """What is found in a step, its predicted peak in the place of the compiled one."""
    places = tuple(donate)
    found = predict(step, *args, target=target, donate_argnums=places)
    with pure_call(step, args, {}, None, ()) as pure:
        call = flatten_call(step, pure)
        closed = trace(flat_function(lambda: step, call), call).jaxpr
    counts = [sum(map(is_array, jax.tree.leaves(a))) for a in args]
    starts = [sum(counts[:i]) for i in range(len(args))]
    donated = tuple(
        s + k for i in places for s in [starts[i]] for k in range(counts[i])
    )
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


@pytest.mark.fast("gru", "waves")
@pytest.mark.parametrize("name", RECURRENT)
def test_schedule_is_named_where_substitute_does_nothing(name):
    loss, *args = RECURRENT[name]
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
        dropout = nn.Dropout(0.1, deterministic=False)
        return transformer(x, lambda x, n: nn.Dense(n)(x), dropout)


def linen_step(model, only_gradients):
    keys = {"dropout": jax.random.key(0), "params": jax.random.key(1)}
    x = S((4, 128, 64), F32)
    params = jax.eval_shape(OfLinen().init, keys, x)

    def loss(params, x):
        return jnp.square(
            model.apply(params, x, rngs={"dropout": keys["dropout"]})
        ).sum()

    def step(params, x):
        if only_gradients:
            return jax.grad(loss)(params, x)
        value, grads = jax.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda w, g: w - 0.1 * g, params, grads), value

    return step, params, x


@pytest.mark.parametrize("only_gradients", some_fast([False, True], False))
def test_substitute_is_named_until_it_is_done(only_gradients):
    plain = remedies(*linen_step(OfLinen(), only_gradients))
    (one,) = [r for r in plain if r.call == "jaxmem.substitute"]
    assert "dot_product_attention" in one.why  # XLA does not keep what gelu has inside
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


def differentiating(monkeypatch, change):
    """Steps traced from now on differentiate `change` of their functions."""
    for name in ("grad", "value_and_grad", "vjp"):
        plain = getattr(jax, name)
        changed = lambda fn, *a, plain=plain, **k: plain(change(fn), *a, **k)
        monkeypatch.setattr(jax, name, changed)


def arrays_of(args):
    """The arrays, and what puts others in their places: modules hold functions too."""
    leaves, tree = jax.tree.flatten(args)
    places = [i for i, leaf in enumerate(leaves) if is_array(leaf)]

    def whole(arrays):
        given = dict(zip(places, arrays, strict=True))
        return jax.tree.unflatten(tree, [given.get(i, x) for i, x in enumerate(leaves)])

    return [leaves[i] for i in places], whole


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_substitute_is_never_named_where_nothing_is_found(program, monkeypatch):
    found = []

    def listened(fn):
        def call(*args, **kwargs):
            arrays, whole = arrays_of(args)
            # traced once: the functions of nnx have effects of their own
            trace = jax.make_jaxpr(
                lambda *a: fn(*whole(a), **kwargs), return_shape=True
            )
            closed, shapes = trace(*arrays)
            run = lambda *arrays: jaxprs.evaluate(closed, list(arrays))
            found.append(rewriting.find(run, *arrays).counts)
            return jax.tree.unflatten(jax.tree.structure(shapes), run(*arrays))

        return call

    step, args, donate = program.make("small")
    differentiating(monkeypatch, listened)
    of = lambda x: S(x.shape, x.dtype) if hasattr(x, "dtype") else x
    shapes = jax.tree.map(of, args)
    calls = named(remedies(step, *shapes, donate=donate))
    assert "substitute" not in calls or any(found)


@pytest.mark.slow
@pytest.mark.parametrize("program", PROGRAMS, ids=str)
def test_what_is_expected_is_compiled(program, monkeypatch):
    step, args, donate = program.make("big")
    how = {"target": "h100", "donate_argnums": donate}
    report = jaxmem.estimate(step, *args, **how)
    for line in report.advice:
        size, call = re.fullmatch(r"about (.*?) with (.*?): .*", line).groups()
        if call == "jaxmem.substitute":
            with monkeypatch.context() as patch:
                differentiating(patch, jaxmem.substitute)
                jax.clear_caches()  # a step of `eqx.filter_jit` has its trace in them
                with_it = lambda *args: step(*args)  # another one: a trace is kept
                after = jaxmem.estimate(with_it, *args, **how).peak_bytes
        else:
            budget = re.search(r'budget="(.*?)"', call)
            options = {"budget": budget[1]} if budget else {}
            scheduled = jaxmem.schedule(step, **how, **options, progress=False)
            after = scheduled.plan(*args).scheduled.peak_bytes
        expected = parse_bytes(size.replace(" ", ""), "size")
        assert after <= FAR * expected, line


def test_what_is_free_is_told_with_what_compilers_are_off():
    """Two arrays of what is left of the peak: a graph does not show them."""
    step, args, donate = sum_of_matrices.make("big")
    how = {"target": "h100", "donate_argnums": donate}
    (one,) = jaxmem.estimate(step, *args, **how).advice
    size = re.match(r"about (.*?) with jaxmem.schedule\(step, target", one)
    assert size is not None
    plan = jaxmem.schedule(step, **how, progress=False).plan(*args)
    assert plan.scheduled.peak_bytes <= parse_bytes(size[1].replace(" ", ""), "size")


def mlp(w, x):
    def loss(w):
        return jnp.square(jax.nn.gelu(jax.nn.gelu(x @ w) @ w)).sum()

    value, grads = jax.value_and_grad(loss)(w)
    return w - grads, value


def test_advice_is_asked_for_when_it_is_read(monkeypatch):
    asked = []
    monkeypatch.setattr(_adviser, "adviser", lambda step: asked.append(step) or ("x",))
    w, x = S((32, 32), F32), S((4096, 32), F32)
    report = jaxmem.estimate(mlp, w, x, target="cpu", donate_argnums=0)
    assert report.at_peak and not asked
    stored = pickle.loads(pickle.dumps(report))
    assert stored.advice == () and not asked  # its equations are not stored
    assert report.advice == ("x",) == report.advice and len(asked) == 1
    assert asked[0].peak_bytes == report.peak_bytes and asked[0].donated == (0,)
    assert "What to do:\n  - x" in str(report)
    assert type(report).from_json(report.to_json()).advice == ("x",)


def test_a_report_tells_that_advice_failed(monkeypatch):
    def fail(step):
        raise RecursionError("too deep")

    monkeypatch.setattr(_adviser, "adviser", fail)
    w, x = S((32, 32), F32), S((2048, 32), F32)
    (line,) = jaxmem.estimate(mlp, w, x, target="cpu").advice
    assert "RecursionError: too deep" in line
