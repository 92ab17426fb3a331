"""substitute() on nnx models: the same graph with other classes, and less kept."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxmem.nn
from jaxmem.nn import Rule
from tests.nn import nnx_models as models
from tests.nn.compare import assert_close, assert_trees_identical, kept_bytes

TOKENS = jax.random.randint(jax.random.key(7), (2, 9), 0, 11)


def loop(**options):
    return models.Loop(rngs=nnx.Rngs(0), **options)


def stack(**options):
    return models.Stack(rngs=nnx.Rngs(0), **options)


CASES = {"loop": loop, "stack": stack, "stack_remat": lambda: stack(remat=True)}


@nnx.jit
def run(model, *args):
    return model(*args)


def state(model):
    return nnx.to_pure_dict(nnx.state(model))


@nnx.jit
def value_and_grad(model, tokens):
    value, grads = nnx.value_and_grad(models.loss)(model, tokens)
    return value, nnx.to_pure_dict(grads)


@pytest.mark.parametrize(
    "case",
    [pytest.param(c, marks=() if c == "stack" else pytest.mark.slow) for c in CASES],
)
def test_same_model(case):
    plain = CASES[case]()
    before = jax.tree.map(jnp.copy, state(plain))
    lean = jaxmem.nn.substitute(plain)
    assert_trees_identical(before, state(lean))
    got = value_and_grad(lean, TOKENS)
    assert_trees_identical(before, state(plain))  # its statistics did not move
    # Gradients through kept outputs: see ROUNDINGS in test_substitute_linen.
    assert_close(value_and_grad(plain, TOKENS), got, roundings=1000)
    assert_close(state(plain), state(lean))  # BatchNorm's statistics and key counts
    assert type(lean).__name__ == type(plain).__name__
    assert isinstance(lean, type(plain))


def test_classes_sharing_and_report():
    plain = loop()
    lean = jaxmem.nn.substitute(plain)
    assert lean.norm is lean.last
    assert isinstance(lean.blocks[0].up, jaxmem.nn.nnx.Linear)
    assert type(plain.blocks[0].up) is nnx.Linear
    assert lean.blocks[0].norm1.save == "output"
    report = jaxmem.nn.report(lean)
    paths = {entry.path for entry in report.modules}
    assert {"stats", "blocks/0/attention/query", "head"} <= paths
    assert len({"norm", "last"} & paths) == 1
    assert not report.traced
    assert any("gelu" in line for line in jaxmem.nn.report(lean, TOKENS).patterns)


@pytest.mark.fast("stack")
@pytest.mark.parametrize("make", [loop, stack])
def test_keeps_much_less(make):
    plain = make(width=32)
    tokens = jnp.zeros((2, 65), int)

    def kept(model):
        graph, params, rest = nnx.split(model, nnx.Param, ...)
        return kept_bytes(
            lambda p: models.loss(nnx.merge(graph, p, rest, copy=True), tokens), params
        )

    assert kept(jaxmem.nn.substitute(plain)) < kept(plain) / 2


def test_variables_of_an_outer_trace_may_be_closed_over():
    lean = jaxmem.nn.substitute(models.Block(8, nnx.Rngs(0)))
    graph, params, rest = nnx.split(lean, nnx.Param, ...)
    x = jax.random.normal(jax.random.key(1), (2, 4, 8))
    loss = lambda p: nnx.merge(graph, p, rest)(x).sum()
    grads = jax.jit(jax.grad(loss))(params)
    assert all(jnp.any(g != 0) for g in jax.tree.leaves(grads.norm1))


def test_split_merge_vmap_and_clone():
    lean = jaxmem.nn.substitute(stack())
    want = run(lean, TOKENS)
    graph, arrays = nnx.split(lean)
    assert_close(want, jax.jit(lambda s, t: nnx.merge(graph, s)(t))(arrays, TOKENS))
    assert_close(want, run(nnx.clone(lean), TOKENS))

    @nnx.jit
    @nnx.vmap(in_axes=(None, 0))
    def each(model, tokens):
        return model(tokens[None])[0]

    assert_close(want, each(lean, TOKENS))


def test_dropout_keys_advance_through_the_trace():
    lean = jaxmem.nn.substitute(loop(dropout=0.5))
    assert not jnp.allclose(run(lean, TOKENS), run(lean, TOKENS))
    lean.eval()
    assert jnp.array_equal(run(lean, TOKENS), run(lean, TOKENS))


def test_optimizer_trains_as_the_plain_model():
    def train(model):
        optimizer = nnx.Optimizer(model, optax.sgd(0.1), wrt=nnx.Param)

        @nnx.jit
        def step(model, optimizer):
            value, grads = nnx.value_and_grad(models.loss)(model, TOKENS)
            optimizer.update(model, grads)
            return value

        return [float(step(model, optimizer)) for _ in range(20)]

    plain = stack()
    got = train(jaxmem.nn.substitute(plain))
    want = train(plain)
    assert want[-1] < want[0]
    np.testing.assert_allclose(got, want, rtol=1e-4)


class MyRMSNorm(nnx.Module):
    """A norm of the user's own."""

    def __init__(self, width, rngs):
        self.scale = nnx.Param(jnp.ones(width))
        self.epsilon = 1e-6

    def __call__(self, x):
        scale = self.scale[...].reshape((1,) * (x.ndim - 1) + (-1,))
        return x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon) * scale


class Quiet(nnx.LayerNorm):
    """A subclass that keeps `__call__`."""

    extra = 1


class Loud(nnx.LayerNorm):
    """A subclass with a `__call__` of its own."""

    def __call__(self, x):
        return 2 * super().__call__(x)


class Norms(nnx.Module):
    def __init__(self, rngs):
        self.mine = MyRMSNorm(8, rngs)
        self.first = nnx.Linear(8, 8, rngs=rngs)
        self.second = nnx.Linear(8, 8, rngs=rngs)
        self.quiet = Quiet(8, rngs=rngs)
        self.loud = Loud(8, rngs=rngs)
        self.zero = nnx.LayerNorm(
            8, scale_init=nnx.initializers.zeros_init(), rngs=rngs
        )
        self.calls = 0

    def __call__(self, x, double=False, *, rngs=None):
        self.calls += 1
        x = self.quiet(self.first(self.mine(x)))
        self.seen = nnx.Intermediate(x.mean())
        x = self.zero(self.second(self.loud(x))) + x
        noise = 0.0 if rngs is None else jax.random.normal(rngs.noise(), x.shape)
        return (2 if double else 1) * x + noise


def my_lean_norm(module):
    return lambda x: jaxmem.ops.rms_norm(x, module.scale[...], epsilon=module.epsilon)


@pytest.mark.parametrize(
    "replace", [my_lean_norm, jaxmem.nn.nnx.RMSNorm], ids=["function", "class"]
)
def test_rules_and_subclasses(replace):
    x = jax.random.normal(jax.random.key(1), (4, 8))
    rules = [Rule(MyRMSNorm, replace), Rule((nnx.Linear, "^second$"), None)]
    plain = Norms(nnx.Rngs(0))
    lean = jaxmem.nn.substitute(plain, rules)
    assert_close(run(plain, x), run(lean, x))
    entries = {e.path: e for e in jaxmem.nn.report(lean).modules}
    assert entries["mine"].replaced_by == replace.__name__
    assert entries["first"].replaced_by is not None
    assert entries["second"].replaced_by is None
    assert entries["quiet"].replaced_by is not None
    assert isinstance(lean.quiet, Quiet)
    assert isinstance(lean.quiet, jaxmem.nn.nnx.LayerNorm)
    assert entries["loud"].reason == "overrides __call__"
    assert lean.zero.save == "input"
    assert "near zero" in entries["zero"].reason


def test_what_a_call_does_to_the_graph_comes_out():
    x = jax.random.normal(jax.random.key(1), (4, 8))
    plain, other = Norms(nnx.Rngs(0)), Norms(nnx.Rngs(0))
    lean = jaxmem.nn.substitute(other)
    streams = nnx.Rngs(noise=1), nnx.Rngs(noise=1)
    for model, rngs in zip((plain, lean), streams, strict=True):
        model(x, True, rngs=rngs)
    assert_close(plain(x, True, rngs=streams[0]), lean(x, True, rngs=streams[1]))
    assert lean.calls == plain.calls == 2
    assert other.calls == 0
    assert_close(state(plain), state(lean))  # the new Variable too
    assert int(streams[1].noise.count[...]) == int(streams[0].noise.count[...]) == 2


def test_unused_rule_and_nothing_to_replace():
    with pytest.warns(UserWarning, match="'nowhere' matched nothing"):
        jaxmem.nn.substitute(
            nnx.Linear(2, 2, rngs=nnx.Rngs(0)), [Rule("nowhere", None)]
        )(jnp.ones((1, 2)))

    class Plus(nnx.Module):
        def __call__(self, x):
            return x + 1

    with pytest.warns(UserWarning, match="nothing to replace"):
        jaxmem.nn.substitute(Plus())(jnp.ones(3))


class Branches(nnx.Module):
    """Looks at a value: runs only without a trace."""

    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x):
        return self.norm(x if x[0, 0] > 0 else -x)


def test_model_that_cannot_be_traced_still_gets_its_modules():
    plain = Branches(nnx.Rngs(0))
    lean = jaxmem.nn.substitute(plain)
    x = jnp.asarray(np.arange(8.0).reshape(2, 4) + 1, jnp.float32)
    with pytest.warns(UserWarning, match="cannot be traced"):
        y = lean(x)
    assert_close(plain(x), y)


def test_functions():
    def mlp(x, w, name="unused"):
        return jax.nn.gelu(x @ w, approximate=False)

    lean = jaxmem.nn.substitute(mlp)
    x, w = jnp.ones((4, 8)) / 3, jnp.ones((8, 8)) / 9
    assert_close(mlp(x, w), lean(x, w, name="kept"))
    assert any("gelu" in line for line in jaxmem.nn.report(lean).patterns)
    assert lean.__name__ == "mlp"
