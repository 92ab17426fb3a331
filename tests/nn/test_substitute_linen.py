"""substitute() on linen models: the same model, and less kept."""

import copy
import pickle

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training.train_state import TrainState

import jaxmem.nn
from jaxmem.nn import Rule
from tests.nn import linen_models as models
from tests.nn.compare import (
    assert_close,
    assert_trees_identical,
    drawn,
    initialized,
    kept_bytes,
)

TOKENS = jax.random.randint(jax.random.key(7), (2, 8), 0, 11)
IMAGES = jax.random.normal(jax.random.key(8), (2, 6, 6, 3))

CASES = {
    "loop": (models.Bert(style="loop"), (TOKENS,)),
    "scan": (models.Bert(style="scan"), (TOKENS,)),
    "remat": (models.Bert(style="remat"), (TOKENS,)),
    "scan_remat": (models.Bert(style="scan_remat"), (TOKENS,)),
    "setup": (models.Gpt(nn.Dense(11)), (TOKENS,)),
    "resnet": (models.ResNet(), (IMAGES, True)),
}


def loss_of(model, args):
    def loss(params, rest):
        y, state = model.apply({"params": params, **rest}, *args, mutable=list(rest))
        return jnp.mean(jnp.sin(y)), state

    return loss


def value_and_grad(model, variables, args):
    rest = {k: v for k, v in variables.items() if k != "params"}
    fn = jax.value_and_grad(loss_of(model, args), has_aux=True)
    return jax.jit(fn)(variables["params"], rest)


# Kept outputs: the derivative of SiLU found from its float32 output is off by up to
# 6e-5 (500 roundings) near its minimum; twice that, as it enters every later sum.
ROUNDINGS = {"input": 64, "output": 1000}


def _slow_but(fast, cases):
    """All of them, those that are not `fast` in the slow suite."""
    return [
        pytest.param(*c, marks=() if c in fast else pytest.mark.slow) for c in cases
    ]


@pytest.mark.parametrize(
    "case, save",
    _slow_but(
        [("scan", "output"), ("setup", "input")],
        [*((c, "output") for c in CASES), ("loop", "input"), ("setup", "input")],
    ),
)
def test_same_model(case, save):
    plain, args = CASES[case]
    lean = jaxmem.nn.substitute(plain, save=save)
    variables = drawn(plain, *args)
    key = jax.random.key(0)
    assert jax.eval_shape(lean.init, key, *args) == jax.eval_shape(
        plain.init, key, *args
    )
    want = value_and_grad(plain, variables, args)
    assert_close(want, value_and_grad(lean, variables, args), ROUNDINGS[save])
    assert type(lean).__name__ == type(plain).__name__
    assert isinstance(lean, type(plain))


@pytest.mark.fast("scan")
@pytest.mark.parametrize("style", ["loop", "scan"])
def test_keeps_much_less(style):
    plain = models.Bert(style=style, width=64, dtype=jnp.bfloat16, dropout=0.1)
    lean = jaxmem.nn.substitute(plain)
    tokens = jnp.zeros((2, 64), int)

    def kept(model):
        rngs = {"dropout": jax.random.key(1)}
        return kept_bytes(lambda v: model.apply(v, tokens, False, rngs=rngs), variables)

    with jax.numpy_dtype_promotion("standard"):  # Flax's norms cannot do without
        variables = jax.eval_shape(plain.init, jax.random.key(0), tokens)
        assert kept(lean) < kept(plain) / 3


def test_dropout_trains_and_depends_on_the_key():
    lean = jaxmem.nn.substitute(models.Bert(style="scan", dropout=0.5))
    variables = drawn(lean, TOKENS)

    @jax.jit
    def run(key):
        return lean.apply(variables, TOKENS, False, rngs={"dropout": key})

    a, b, c = (run(jax.random.key(k)) for k in (1, 2, 1))
    assert jnp.array_equal(a, c)
    assert not jnp.allclose(a, b)


def test_a_jitted_plain_model_is_not_affected_and_a_new_one_is():
    plain = models.Bert()
    variables = drawn(plain, TOKENS)
    step = jax.jit(plain.apply)
    before = step(variables, TOKENS)
    kept = kept_bytes(step, variables, TOKENS)
    lean = jaxmem.nn.substitute(plain)
    assert kept_bytes(jax.jit(lean.apply), variables, TOKENS) < kept / 2
    assert kept_bytes(step, variables, TOKENS) == kept
    assert jnp.array_equal(before, step(variables, TOKENS))


JittedNorm = nn.jit(nn.LayerNorm)


class Jitted(nn.Module):
    """A layer behind nn.jit, whose trace is kept for all instances of the class."""

    @nn.compact
    def __call__(self, x):
        return JittedNorm(name="norm")(x)


def test_nn_jit_does_not_reuse_the_plain_trace():
    x = jax.random.normal(jax.random.key(1), (4, 8))
    plain = Jitted()
    variables = drawn(plain, x)
    want = plain.apply(variables, x)
    # Formulas would be found in the reused trace too: look for modules only.
    lean = jaxmem.nn.substitute(plain, patterns=())
    assert_close(want, lean.apply(variables, x))
    assert [e.path for e in jaxmem.nn.report(lean).modules] == ["norm"]
    kept = kept_bytes(plain.apply, variables, x)
    assert kept_bytes(lean.apply, variables, x) < kept / 2
    assert kept_bytes(plain.apply, variables, x) == kept


@pytest.mark.slow
def test_every_way_in():
    plain = models.Gpt(nn.Dense(11))
    lean = jaxmem.nn.substitute(plain)
    variables = lean.init({"params": jax.random.key(0)}, TOKENS)
    y, repeated = lean.init_with_output(jax.random.key(0), TOKENS)
    assert_trees_identical(variables, repeated)
    want = lean.apply(variables, TOKENS)
    assert_close(y, want)
    assert_close(want, lean.bind(variables)(TOKENS))
    features = plain.apply(variables, TOKENS, method="features")
    for method in ("features", lean.features, models.Gpt.features):
        assert_close(features, lean.apply(variables, TOKENS, method=method))
    assert "RMSNorm" in lean.tabulate(jax.random.key(0), TOKENS)
    state = TrainState.create(
        apply_fn=lean.apply, params=variables["params"], tx=optax.sgd(0.1)
    )
    assert_close(want, state.apply_fn({"params": state.params}, TOKENS))
    copied = lean.clone(layers=1)
    assert "blocks_1" not in initialized(copied, TOKENS)["params"]
    assert_close(want, copy.deepcopy(lean).apply(variables, TOKENS))


def test_pickle():
    lean = jaxmem.nn.substitute(models.ResNet(), [Rule(nn.GroupNorm, None)])
    loaded = pickle.loads(pickle.dumps(lean))
    assert isinstance(loaded, models.ResNet)
    assert loaded.jaxmem_substitution.request == lean.jaxmem_substitution.request


def test_capture_intermediates_and_mutable_collections():
    plain = models.Gpt(nn.Dense(11))
    lean = jaxmem.nn.substitute(plain)
    variables = drawn(plain, TOKENS)
    options = dict(capture_intermediates=True, mutable=["intermediates"])
    run = lambda m: jax.jit(lambda v: m.apply(v, TOKENS, **options))(variables)
    assert_close(run(plain), run(lean))


class Outer(nn.Module):
    """A plain model with a substituted one inside."""

    inner: nn.Module

    def __call__(self, tokens):
        return 2 * self.inner(tokens)


def test_substituted_part_of_a_plain_model():
    variables = initialized(Outer(models.Bert()), TOKENS)
    outer = Outer(jaxmem.nn.substitute(models.Bert()))
    assert_trees_identical(variables, initialized(outer, TOKENS))
    want = jax.jit(Outer(models.Bert()).apply)(variables, TOKENS)
    assert_close(want, jax.jit(outer.apply)(variables, TOKENS))
    assert jaxmem.nn.report(outer.inner).replaced()


class MyRMSNorm(nn.Module):
    """A norm of the user's own, with a parameter name of its own."""

    epsilon: float = 1e-6

    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + self.epsilon)
        return x * scale.reshape((1,) * (x.ndim - 1) + (-1,))


class Quiet(nn.LayerNorm):
    """A subclass that keeps `__call__`."""


class Loud(nn.LayerNorm):
    """A subclass with a `__call__` of its own."""

    @nn.compact
    def __call__(self, x):
        shift = self.param("shift", nn.initializers.ones, (x.shape[-1],))
        return x + shift.reshape((1,) * (x.ndim - 1) + (-1,))


class Norms(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = nn.Dense(8, name="first")(MyRMSNorm(name="mine")(x))
        x = nn.Dense(8, name="second")(Quiet(name="quiet")(x))
        return nn.LayerNorm(name="zero", scale_init=nn.initializers.zeros)(
            Loud(name="loud")(x)
        )


def my_lean_norm(module):
    def call(x):
        scale = module.get_variable("params", "scale")
        return jaxmem.ops.rms_norm(x, scale, epsilon=module.epsilon)

    return call


@pytest.mark.parametrize(
    "replace", [my_lean_norm, jaxmem.nn.linen.RMSNorm], ids=["function", "class"]
)
def test_rules_and_subclasses(replace):
    x = jax.random.normal(jax.random.key(1), (4, 8))
    rules = [Rule(MyRMSNorm, replace), Rule((nn.Dense, "^second$"), None)]
    plain, lean = Norms(), jaxmem.nn.substitute(Norms(), rules)
    variables = drawn(plain, x)
    assert_close(
        value_and_grad(plain, variables, (x,)), value_and_grad(lean, variables, (x,))
    )
    entries = {e.path: e for e in jaxmem.nn.report(lean).modules}
    assert entries["mine"].replaced_by == replace.__name__
    assert entries["first"].replaced_by is not None
    assert entries["second"].replaced_by is None
    assert entries["quiet"].replaced_by is not None
    assert entries["loud"].replaced_by is None
    assert "overrides" in entries["loud"].reason
    assert "input" in entries["zero"].reason
    assert "output" in entries["quiet"].reason
    assert jaxmem.nn.report(lean).unused_rules == ()


class TwoNorms(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm(name="kept")(nn.Dense(8)(nn.LayerNorm(name="lean")(x)))


def test_an_excluded_module_is_not_replaced_as_a_formula_either():
    x = jax.random.normal(jax.random.key(1), (64, 8))
    plain = TwoNorms()
    variables = drawn(plain, x)
    lean = jaxmem.nn.substitute(plain, [Rule("^kept$", None)])
    assert_close(*(jax.jit(m.apply)(variables, x) for m in (plain, lean)))
    report = jaxmem.nn.report(lean)
    assert report.patterns == ()
    assert {e.path: e.replaced_by is None for e in report.modules}["kept"]
    kept = {
        p: kept_bytes(m.apply, variables, x) for p, m in (("a", plain), ("b", lean))
    }
    # One norm keeps its three float32 inputs, the other nothing of that size.
    assert 2 * x.nbytes < kept["b"] < kept["a"] - x.nbytes


def test_unused_rule_is_reported_and_warned_about_once():
    x = jnp.ones((2, 8))
    lean = jaxmem.nn.substitute(nn.Dense(3), [Rule("no/such/path", None)])
    variables = drawn(lean, x)
    with pytest.warns(UserWarning, match="no/such/path.*matched nothing"):
        lean.apply(variables, x)
    lean.apply(variables, x)
    assert jaxmem.nn.report(lean).unused_rules == ("'no/such/path'",)


def test_nothing_to_replace_warns():
    class Plus(nn.Module):
        def __call__(self, x):
            return x + 1

    with pytest.warns(UserWarning, match="nothing to replace.*LayerNorm"):
        jaxmem.nn.substitute(Plus()).apply({}, jnp.ones(3))


def test_report_ahead_of_any_call(capsys):
    lean = jaxmem.nn.substitute(models.Bert(style="scan"), verbose=True)
    assert not jaxmem.nn.report(lean).traced
    shape = jax.ShapeDtypeStruct(TOKENS.shape, TOKENS.dtype)
    report = jaxmem.nn.report(lean, shape)
    assert report.traced
    paths = [e.path for e in report.modules]
    assert "layers/Block_0/LayerNorm_0" in paths
    assert "layers/Block_0" not in paths
    for text in (str(report), report._repr_html_(), capsys.readouterr().out):
        assert "LayerNorm_0" in text


def test_bare_gelu_is_found():
    lean = jaxmem.nn.substitute(models.Bert(style="scan"))
    report = jaxmem.nn.report(lean, TOKENS)
    assert any("gelu" in line for line in report.patterns)


class Branches(nn.Module):
    """Looks at a value: runs only without a trace."""

    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(x if x[0, 0] > 0 else -x)


def test_model_that_cannot_be_traced_still_gets_its_modules():
    x = jnp.asarray(np.arange(8.0).reshape(2, 4) + 1)
    lean = jaxmem.nn.substitute(Branches())
    variables = lean.init(jax.random.key(0), x)
    with pytest.warns(UserWarning, match="cannot be traced"):
        y = lean.apply(variables, x)
    assert_close(Branches().apply(variables, x), y)
    with pytest.raises(jax.errors.ConcretizationTypeError):
        jax.jit(lean.apply)(variables, x)


def test_left_option_is_in_the_report():
    x = jax.random.normal(jax.random.key(1), (2, 4, 8))
    lean = jaxmem.nn.substitute(nn.SelfAttention(2, precision="highest"))
    jax.eval_shape(lean.apply, drawn(lean, x), x)
    entries = {e.path: e for e in jaxmem.nn.report(lean).modules}
    assert entries[""].reason == "a precision of its own"


@pytest.mark.parametrize("model", [nn.Dense, 3, "model", None])
def test_wrong_type(model):
    with pytest.raises(TypeError, match="flax.linen module"):
        jaxmem.nn.substitute(model)


def test_a_rule_by_path_applies_once():
    """The lean module takes over the path, and would match again."""
    x = jax.random.normal(jax.random.key(1), (4, 8))
    plain = Norms()
    lean = jaxmem.nn.substitute(plain, [Rule("^mine$", jaxmem.nn.linen.RMSNorm)])
    variables = drawn(plain, x)
    assert_close(*(jax.jit(m.apply)(variables, x) for m in (plain, lean)))


def test_bound_module():
    bound = nn.Dense(3).bind({"params": {}})
    with pytest.raises(TypeError, match="bound"):
        jaxmem.nn.substitute(bound)


def test_wrong_options():
    with pytest.raises(ValueError, match="save"):
        jaxmem.nn.substitute(nn.Dense(3), save="both")
    with pytest.raises(TypeError, match="Rule"):
        jaxmem.nn.substitute(nn.Dense(3), [nn.Dense])
    with pytest.raises(TypeError, match="match"):
        Rule(3, None)
    with pytest.raises(TypeError, match="replace"):
        Rule(nn.Dense, 3)
    with pytest.raises(TypeError, match="substitute"):
        jaxmem.nn.report(nn.Dense(3))


@pytest.mark.slow
def test_convergence_against_plain():
    """Thirty steps of SGD stay together: every step's rounding enters the next."""
    plain = models.Bert(style="scan_remat")
    variables = initialized(plain, TOKENS)

    def train(model):
        @jax.jit
        def step(params):
            def loss(params):
                logits = model.apply({"params": params}, TOKENS)
                return optax.softmax_cross_entropy_with_integer_labels(
                    logits, TOKENS
                ).mean()

            value, grads = jax.value_and_grad(loss)(params)
            return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

        params, losses = variables["params"], []
        for _ in range(30):
            params, value = step(params)
            losses.append(float(value))
        return losses

    want, got = train(plain), train(jaxmem.nn.substitute(plain))
    assert want[-1] < want[0] / 2
    np.testing.assert_allclose(got, want, rtol=1e-3)
