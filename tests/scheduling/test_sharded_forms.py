"""Sharded steps as users of Flax write them: the same losses, within a budget too.

Logical axes of linen, metadata of nnx, and constraints under `jax.set_mesh`.
"""

import contextlib
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from tests.sets import some_fast

pytestmark = pytest.mark.usefixtures("standard_jax")  # optax and flax promote types
WIDTH, LAYERS, BATCH = 64, 4, 512
TX = optax.adam(1e-3)
RULES = (("batch", "data"), ("mlp", "model"), ("embed", None), ("layers", None))
INIT = nn.initializers.lecun_normal()


@pytest.fixture(scope="module")
def mesh():
    return jax.make_mesh((4, 2), ("data", "model"), (AxisType.Auto,) * 2)


def rows(mesh, i: int):
    x = jax.random.normal(jax.random.key(i), (BATCH, WIDTH))
    return jax.device_put(x, NamedSharding(mesh, P("data")))


def error(found, x):
    return jnp.mean(jnp.square(found - x[:, ::-1]))


def step_of(loss: Callable) -> Callable:
    def step(state, x):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, moments = TX.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    return step


class LogicalLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        x = nn.with_logical_constraint(x, ("batch", "embed"))
        columns = nn.with_logical_partitioning(INIT, ("embed", "mlp"))
        back = nn.with_logical_partitioning(INIT, ("mlp", "embed"))
        hidden = nn.gelu(nn.Dense(4 * WIDTH, kernel_init=columns)(x))
        return x + nn.Dense(WIDTH, kernel_init=back)(hidden), None


class LogicalModel(nn.Module):
    @nn.compact
    def __call__(self, x):
        layers = nn.scan(
            LogicalLayer,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=LAYERS,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers()(x, None)[0]


class Form(NamedTuple):
    step: Callable
    state: Callable
    context: Callable = contextlib.nullcontext


def logical(mesh) -> Form:
    model, key, x = LogicalModel(), jax.random.key(0), jnp.ones((BATCH, WIDTH))

    def state():
        names = nn.get_partition_spec(jax.eval_shape(model.init, key, x))
        where = nn.logical_to_mesh_sharding(names, mesh, RULES)
        params = jax.jit(model.init, out_shardings=where)(key, x)
        return params, TX.init(params)

    def loss(params, x):
        with nn.logical_axis_rules(RULES):
            return error(model.apply(params, x), x)

    return Form(step_of(loss), state, lambda: jax.set_mesh(mesh))


def named(mesh) -> Form:
    """Specs without a mesh, which is that of the context."""

    def state():
        keys = jax.random.split(jax.random.key(0), 2)
        shapes = (LAYERS, WIDTH, 4 * WIDTH), (LAYERS, 4 * WIDTH, WIDTH)
        specs = P(None, None, "model"), P(None, "model", None)
        draw = lambda key, shape: jax.random.normal(key, shape) / shape[1] ** 0.5
        params = [
            jax.device_put(draw(key, shape), NamedSharding(mesh, spec))
            for key, shape, spec in zip(keys, shapes, specs, strict=True)
        ]
        return params, TX.init(params)

    def layer(x, w):
        x = jax.lax.with_sharding_constraint(x, P("data"))
        return x + jax.nn.gelu(x @ w[0]) @ w[1], None

    loss = lambda params, x: error(jax.lax.scan(layer, x, params)[0], x)
    return Form(step_of(loss), state, lambda: jax.set_mesh(mesh))


FORMS = pytest.mark.parametrize("form", [logical, named], ids=lambda f: f.__name__)


def losses(step, form: Form, mesh) -> list[float]:
    found, state = [], form.state()
    for i in range(3):
        state, loss = step(state, rows(mesh, i))
        found.append(float(loss))
    return found


@pytest.mark.parametrize(
    "form", some_fast([logical, named], named), ids=lambda f: f.__name__
)
def test_the_losses_are_those_of_the_step(form, mesh):
    made = form(mesh)
    with made.context():
        plain = losses(jax.jit(made.step, donate_argnums=0), made, mesh)
        step = jaxmem.schedule(made.step, donate_argnums=0)
        # a sum over devices may be made in another order: some roundings of float32
        np.testing.assert_allclose(losses(step, made, mesh), plain, rtol=1e-5)
        plan = step.plan(made.state(), rows(mesh, 0))
    assert plain[2] < plain[0]
    assert plan.released_bytes > 0 and plan.kept_bytes == 0
    assert plan.mesh == (("data", 4), ("model", 2))


@pytest.mark.slow
@FORMS
def test_a_budget_of_each_device(form, mesh):
    made = form(mesh)
    with made.context():
        plain = losses(jax.jit(made.step, donate_argnums=0), made, mesh)
        free = jaxmem.schedule(made.step, target="cpu", donate_argnums=0)
        most = free.plan(made.state(), rows(mesh, 0)).scheduled.peak_bytes
        budget = int(0.9 * most)
        step = jaxmem.schedule(made.step, budget, target="cpu", donate_argnums=0)
        np.testing.assert_allclose(losses(step, made, mesh), plain, rtol=1e-5)
        plan = step.plan(made.state(), rows(mesh, 0))
    assert plan.scheduled.peak_bytes <= budget


class Block(nnx.Module):
    def __init__(self, rngs):
        across = lambda *names: nnx.with_partitioning(INIT, names)
        columns, back = across(None, "model"), across("model", None)
        self.up = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs, kernel_init=columns)
        self.down = nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs, kernel_init=back)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


@nnx.jit
def blocks():
    model = nnx.Sequential(*(Block(nnx.Rngs(i)) for i in range(2)))
    state = nnx.state(model)
    specs = nnx.get_partition_spec(state)
    nnx.update(model, jax.lax.with_sharding_constraint(state, specs))
    return model


def nnx_step(model, optimizer, x):
    loss, grads = nnx.value_and_grad(lambda m: error(m(x), x))(model)
    optimizer.update(model, grads)
    return loss


@pytest.mark.parametrize(
    "jitted", some_fast([False, True], True), ids=["plain", "nnx.jit"]
)
def test_nnx_objects_keep_their_shardings(jitted, mesh):
    def train(step):
        model = blocks()
        optimizer = nnx.Optimizer(model, TX, wrt=nnx.Param)
        found = [float(step(model, optimizer, rows(mesh, i))) for i in range(3)]
        return found, model.layers[0].up.kernel

    own = nnx.jit(nnx_step, donate_argnums=(0, 1))
    with jax.set_mesh(mesh):
        plain, _ = train(own)
        how = {} if jitted else {"donate_argnums": (0, 1)}
        scheduled = jaxmem.schedule(own if jitted else nnx_step, **how)
        found, kernel = train(scheduled)
    np.testing.assert_allclose(found, plain, rtol=1e-5)
    assert plain[2] < plain[0]
    assert kernel.get_value().sharding.spec == P(None, "model")
