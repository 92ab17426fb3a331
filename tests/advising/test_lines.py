"""The printed lines, run as they are: they make steps of the printed bytes."""

from typing import Any, NamedTuple

import equinox as eqx
import flax
import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx
from flax.training.train_state import TrainState

import jaxmem
from jaxmem.advising.batches import batch_of
from jaxmem.advising.measures import Goal, of_step
from tests.sets import some_fast

B, WIDTH, HIDDEN = 8, 16, 64
TX = optax.adam(1e-2)
X = jax.ShapeDtypeStruct((B, WIDTH), jnp.float32)
MODULES = {"jax": jax, "jaxmem": jaxmem, "optax": optax, "nnx": nnx, "eqx": eqx}
MODULES |= {"flax": flax, "equinox": eqx}

ENDS = "", " with a budget", " with a budget, the host"

# as users write it: `loss_fn` and `tx` are looked up when the step is traced
TREE = """
def step({0}, opt_state, x):
    loss, grads = {1}(loss_fn)({0}, x)
    updates, opt_state = tx.update(grads, opt_state, {2})
    return {3}({0}, updates), opt_state, loss
"""
OBJECT = """
def step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(loss_fn)(model, x)
    optimizer.update(model, grads)
    return loss
"""


@pytest.fixture(autouse=True)
def as_users():
    """With jax's own promotion, which optax's Adam takes."""
    with jax.numpy_dtype_promotion("standard"):
        yield


class Form(NamedTuple):
    """A loss as users of a framework write it.

    Attributes:
      loss_fn: the loss.
      model: its first argument.
      name: what it is called.
      step: the source of the step.
      state: the optimizer, or its state.
    """

    loss_fn: Any
    model: Any
    name: str
    step: str
    state: Any


def tree(loss_fn, params) -> Form:
    words = "params", "jax.value_and_grad", "params", "optax.apply_updates"
    return Form(loss_fn, params, "params", TREE.format(*words), TX.init(params))


def plain() -> Form:
    def loss_fn(params, x):
        return jnp.mean(jnp.square(jax.nn.gelu(x @ params["up"]) @ params["down"]))

    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return tree(loss_fn, {k: jnp.ones(s) for k, s in shapes.items()})


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(WIDTH)(nn.gelu(nn.Dense(HIDDEN)(nn.LayerNorm()(x))))


LINEN = Linen()


def linen() -> Form:
    def loss_fn(params, x):
        return jnp.mean(jnp.square(LINEN.apply({"params": params}, x)))

    x = jnp.zeros(X.shape)
    return tree(loss_fn, LINEN.init(jax.random.key(0), x)["params"])


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.LayerNorm(WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, WIDTH, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(self.norm(x))))


def of_nnx() -> Form:
    def loss_fn(model, x):
        return jnp.mean(jnp.square(model(x)))

    model = Nnx(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
    return Form(loss_fn, model, "model", OBJECT, optimizer)


def equinox() -> Form:
    def loss_fn(model, x):
        return jnp.mean(jnp.square(jax.vmap(model)(x)))

    how = {"activation": jax.nn.gelu, "key": jax.random.key(0)}
    model = eqx.nn.MLP(WIDTH, WIDTH, HIDDEN, 1, **how)
    trained = "eqx.filter(model, eqx.is_inexact_array)"
    words = "model", "eqx.filter_value_and_grad", trained, "eqx.apply_updates"
    state = TX.init(eqx.filter(model, eqx.is_inexact_array))
    return Form(loss_fn, model, "model", TREE.format(*words), state)


FORMS = {"plain": plain, "linen": linen, "nnx": of_nnx, "equinox": equinox}
forms = pytest.mark.parametrize("make", FORMS.values(), ids=FORMS)


def bytes_of(code, form: Form, target: str) -> int:
    """Of the step that the lines make of what the user has, compiled anew."""
    state = "optimizer" if form.name == "model" and form.step == OBJECT else "opt_state"
    env = {"loss_fn": form.loss_fn, form.name: form.model, state: form.state}
    env |= {"tx": TX, "learning_rate": 1e-3, **MODULES}
    exec(form.step, env)
    exec("\n".join(code), env)
    batch = (X, None) if any("microbatch" in line for line in code) else (X,)
    args = env[form.name], env[state], *batch
    how = {"target": target, "donate_argnums": (0, 1), "cache": False}
    return jaxmem.estimate(env["step"], *args, **how).peak_bytes


def advised(form: Form, **options):
    how = {"tx": TX, "every": True, "target": "cpu", "budget": "1GiB", **options}
    return jaxmem.advise(form.loss_fn, form.model, X, **how)


@pytest.mark.parametrize("make", some_fast(FORMS.values(), of_nnx), ids=FORMS)
def test_every_framework_finds_the_way_to_fit(make):
    """Less than one element below the plain step: substituted, it fits."""
    form = make()
    how = {"donate_argnums": (0, 1), "target": "cpu"}
    env = {"loss_fn": form.loss_fn, "tx": TX, **MODULES}
    exec(form.step, env)
    plain = jaxmem.estimate(env["step"], form.model, form.state, X, **how).peak_bytes
    advice = advised(form, every=False, budget=plain - 1)
    assert advice.measures[0].peak_bytes == plain
    assert advice.taken is advice.measures[1] and advice.taken.name == "substitute"
    assert bytes_of(advice.taken.code, form, "cpu") == advice.taken.peak_bytes


@pytest.mark.slow
@forms
def test_all_lines_make_the_step_whose_bytes_are_printed(make):
    form, target = make(), "h100"
    allow = ("bits", "moments", "adama")
    measures = advised(form, target=target, allow=allow).measures
    names = [one.name for one in measures]
    assert any("AdamA over 8 micro-batches" in name for name in names)
    assert any(name.startswith("substitute with") for name in names)
    assert any("moments on the host" in name for name in names)
    exact = [one.exact for one in measures]
    assert exact == sorted(exact, reverse=True)
    for one in measures:
        assert one.fits, one
        assert bytes_of(one.code, form, target) == one.peak_bytes, one.name


def nnx_step(model, optimizer, x):
    loss = lambda model: jnp.mean(jnp.square(model(x)))
    optimizer.update(model, nnx.grad(loss)(model))


def linen_step(state, x):
    def loss(params):
        return jnp.mean(jnp.square(state.apply_fn({"params": params}, x)))

    return state.apply_gradients(grads=jax.grad(loss)(state.params))


def train_state():
    params = LINEN.init(jax.random.key(0), jnp.zeros(X.shape))["params"]
    return TrainState.create(apply_fn=LINEN.apply, params=params, tx=TX)


def step_of(kind):
    form = of_nnx()
    if kind == "nnx":
        return nnx_step, {"model": form.model, "optimizer": form.state, "x": X}
    return linen_step, {"state": train_state(), "x": X}


@pytest.mark.parametrize("kind", some_fast(["nnx", "linen"], "linen"))
def test_the_model_of_a_step_is_substituted(kind):
    step, given = step_of(kind)
    places = {"donate_argnums": tuple(range(len(given) - 1)), "target": "cpu"}
    plain = jaxmem.estimate(step, *given.values(), **places).peak_bytes
    advice = jaxmem.advise(step, *given.values(), budget=plain - 1, **places)
    assert advice.taken.name == "substitute"
    env = {**given, "jaxmem": jaxmem}
    exec(advice.code, env)
    args = [env[name] for name in given]
    how = {**places, "cache": False}
    assert jaxmem.estimate(step, *args, **how).peak_bytes == advice.taken.peak_bytes


@pytest.mark.parametrize("kind", some_fast(["nnx", "linen"], "nnx"))
def test_the_model_of_a_step_is_kept_in_few_bits_where_allowed(kind):
    step, given = step_of(kind)
    args, goal = tuple(given.values()), Goal("cpu", 2**30, "1GiB", step.__name__)
    found = [
        *of_step(step, args, {}, {}, goal),
        *of_step(step, args, {}, {}, goal, ["bits"]),
    ]
    low = [measure for measure in found if measure.error != "none"]
    names = [measure.name for measure in low]
    first = "substitute with activations in 8 bits, schedule"
    assert names == [first + end for end in ENDS]
    assert "save=8)" in low[0].code[0] and "% of a gradient" in low[0].error
    name = step.__name__
    assert low[0].code[-1] == f'{name} = jaxmem.schedule({name}, target="cpu")'


def test_a_loss_without_anything_to_substitute_says_so():
    loss_fn = lambda params, x: jnp.mean(jnp.square(x @ params))
    form = tree(loss_fn, jnp.ones((WIDTH, WIDTH)))
    with pytest.warns(UserWarning, match="nothing to replace"):
        measures = advised(form).measures
    names = [one.name for one in measures]
    assert names[:3] == ["nothing", "substitute", "schedule"]
    assert measures[1].why == "nothing was substituted"
    assert not any("substitute," in name for name in names)


def test_examples_of_several_arguments_go_into_micro_batches():
    def loss(params, x, y, bits):
        return jnp.mean(jnp.square(jax.nn.gelu(x @ params) - y))

    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    args = jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32), X, X, key
    batch = batch_of(loss, loss, args)
    assert batch.examples == B and batch.args == ((X, X), key)
    assert batch.written == "lambda params, batch, rng: loss(params, *batch, rng)"
    assert batch.call == "step(params, opt_state, (x, y), rng)"
    assert batch_of(loss, loss, (args[0], X, key)).written == "loss"
    with pytest.raises(ValueError, match=r"allow='adama': .* first axis in common"):
        batch_of(loss, loss, (args[0], X, jax.ShapeDtypeStruct((3,), jnp.float32)))
