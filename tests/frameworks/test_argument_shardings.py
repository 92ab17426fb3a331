"""Shapes whose shardings cannot be, at every call that takes a step and arguments."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.scheduling import predict

FUNCTIONS = {
    "estimate": lambda step, *args: jaxmem.estimate(step, *args, target="h100"),
    "predict": lambda step, *args: predict(step, *args, target="h100"),
    "lint": jaxmem.lint,
    "advise": lambda step, *args: jaxmem.advise(step, *args, target="h100"),
    "plan": lambda step, *args: jaxmem.schedule(step, donate_argnums=()).plan(*args),
}
REFUSED = pytest.mark.parametrize("function", FUNCTIONS.values(), ids=FUNCTIONS)


def on(devices: int, rows: int) -> jax.ShapeDtypeStruct:
    mesh = jaxmem.target_mesh("h100", (devices,), ("data",))
    where = NamedSharding(mesh, P("data"))
    return jax.ShapeDtypeStruct((rows, 64), jnp.float32, sharding=where)


def step(state, x):
    return jax.grad(lambda w: jnp.square(x @ w).sum())(state["w"])


@REFUSED
def test_an_axis_that_the_devices_do_not_divide(function):
    with pytest.raises(ValueError, match=r"argument 1 of shape \(12, 64\).*'data': 8"):
        function(step, {"w": on(8, 64)}, on(8, 12))


@REFUSED
def test_two_meshes(function):
    words = r"argument 0\['w'\] .*'data': 8.* and argument 1 .*'data': 4.*one mesh"
    with pytest.raises(ValueError, match=words):
        function(step, {"w": on(8, 64)}, on(4, 16))


def test_a_plan_is_of_one_mesh():
    args = {"w": on(8, 64)}, on(8, 16)
    plan = jaxmem.schedule(step, "1MiB", target="h100", donate_argnums=()).plan(*args)
    assert plan.mesh == (("data", 8),)
    plan = type(plan).from_json(plan.to_json())
    scheduled = jaxmem.schedule(step, plan=plan, donate_argnums=())
    assert scheduled.plan(*args).mesh == plan.mesh
    with pytest.raises(
        ValueError, match=r"on a mesh of \{'data': 8\}, and these are on"
    ):
        scheduled.plan({"w": on(4, 64)}, on(4, 16))
    with pytest.raises(ValueError, match="and these are on one device"):
        scheduled.plan({"w": jnp.ones((64, 64))}, jnp.ones((16, 64)))
