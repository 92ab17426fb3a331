"""The zoo has the models that were published, and its steps are training steps."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from benchmarks.models import zoo
from benchmarks.models.transformers import StackConfig
from benchmarks.models.zoo_transformers import GPT2
from benchmarks.readings.eager import every_equation
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.planning import peak
from tests.sets import one_of, slow_unless

pytestmark = pytest.mark.usefixtures("standard_jax")


def parameters(args) -> int:
    return sum(x.size for x in jax.tree.leaves(args[0][0]))


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=slow_unless(one_of(4, n) == 0)) for n in zoo.ZOO]
)
def test_parameters_are_those_published(name):
    found = zoo.ZOO[name]
    _, args, donated = zoo.step(name, scanned=found.layered)
    assert parameters(args) == found.parameters
    assert donated == (0,)
    assert all(isinstance(x, jax.ShapeDtypeStruct) for x in jax.tree.leaves(args))


@pytest.mark.fast("gpt2_small")
@pytest.mark.parametrize("name", ["vit_b", "bert_base", "gpt2_small"])
def test_scanned_and_unrolled_have_the_same_parameters(name):
    (_, unrolled, _), (_, scanned, _) = (zoo.step(name, scanned=s) for s in (0, 1))
    assert parameters(unrolled) == parameters(scanned)


@pytest.mark.fast("alexnet", "llama3_8b")
@pytest.mark.parametrize(
    "name",
    ["alexnet", "unet", "llama3_8b", pytest.param("resnet50", marks=pytest.mark.slow)],
)
def test_a_step_gives_its_state_back(name):
    step, (state, *batch), _ = zoo.step(name, 2, scanned=zoo.ZOO[name].layered)
    new, loss = jax.eval_shape(step, state, *batch)
    assert jax.tree.structure(new) == jax.tree.structure(state)
    for was, now in zip(jax.tree.leaves(state), jax.tree.leaves(new), strict=True):
        assert (was.shape, was.dtype) == (now.shape, now.dtype)
    assert loss.shape == ()


@pytest.mark.slow
def test_layers_are_unrolled_unless_asked_for():
    def dots(scanned):
        step, args, _ = zoo.step("gpt2_small", scanned=scanned)
        eqns = _jaxpr.walk(jax.make_jaxpr(step)(*args))
        return sum(e.primitive.name == "dot_general" for e in eqns)

    # a layer has 8 products: 4 projections, 2 of attention, 2 of the MLP; each twice
    # more in the backward pass; eleven layers more where they are unrolled
    assert dots(False) - dots(True) == 11 * 8 * 3


def test_a_small_step_learns():
    """The step as it is, on arrays: the loss on one batch goes down."""
    config = StackConfig(1, 16, 2, 2, 32, dropout=0.0, dtype=np.float32)
    model, tx = GPT2(config, False, vocabulary=11, positions=8), optax.adam(1e-2)
    tokens = jax.random.randint(jax.random.key(0), (2, 8), 0, 11)
    params = jax.jit(model.init)(jax.random.key(1), tokens)["params"]
    state, run = (params, {}, tx.init(params)), jax.jit(zoo.train_step(model, tx))
    losses = []
    for _ in range(20):
        state, loss = run(state, tokens, tokens, np.zeros(2, np.uint32))
        losses.append(float(loss))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gpt3", {}, "the zoo has alexnet"),
        ("vgg16", {"scanned": True}, "no stack of equal layers"),
        ("vgg16", {"batch": 0}, "at least 1"),
    ],
)
def test_bad_input(name, options, message):
    with pytest.raises(ValueError, match=message):
        zoo.step(name, **options)


def test_an_eager_graph_has_every_equation_and_no_view():
    def step(w, x):
        y = (x @ w).reshape(-1)
        return w - y.sum(), jnp.tanh(y)

    w = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    closed = jax.make_jaxpr(step)(w, w)
    graph = every_equation(closed, {0: 0})
    names = [operation.name for operation in graph.operations]
    assert names == ["dot_general", "reduce_sum", "sub", "tanh"]
    # the product and its tanh; the new w lies in the old one
    assert peak(graph) == 2 * 256
    assert dict(graph.aliases) == {graph.outputs[0]: graph.arguments[0]}
