"""A plan is for one step: what differs in another must show in the fingerprint."""

import dataclasses
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.scheduling.plan.fingerprint import fingerprint

X = jnp.ones((4, 4))


def of(fn, *args, **options):
    return fingerprint(jax.make_jaxpr(fn)(*args), **options)


def chain(x, y):
    def body(h, _):
        return jnp.sin(h) @ y, None

    h = jax.nn.relu(jax.lax.scan(body, x, None, length=3)[0])
    return jax.lax.cond(True, jnp.cos, jnp.sin, h), h.sum()


def test_the_same_step_has_the_same():
    assert of(chain, X, X) == of(lambda a, b: chain(a, b), X, X)


@pytest.mark.parametrize(
    "one, other",
    [
        (lambda x, y: (x @ y, x), lambda x, y: (y @ x, x)),
        (lambda x, y: jnp.sin(x) + jnp.cos(x), lambda x, y: jnp.sin(x) + jnp.cos(y)),
        (lambda x, y: (x, y), lambda x, y: (y, x)),
        (lambda x, y: x * 2.0, lambda x, y: x * 3.0),
        (lambda x, y: x.sum(0), lambda x, y: x.sum(1)),
        (
            lambda x, y: jax.lax.scan(lambda c, _: (c @ y, None), x, None, length=2)[0],
            lambda x, y: jax.lax.scan(lambda c, _: (y @ c, None), x, None, length=2)[0],
        ),
    ],
    ids=["operands", "wiring", "outputs", "literals", "parameters", "in a loop"],
)
def test_other_operations(one, other):
    assert of(one, X, X) != of(other, X, X)


def test_other_types_donation_and_clip():
    weak = jax.ShapeDtypeStruct((), jnp.float32, weak_type=True)
    strong = jax.ShapeDtypeStruct((), jnp.float32)
    scale = lambda x, s: x * s
    marks = [
        of(scale, X, weak),
        of(scale, X, strong),
        of(scale, X, strong, donated=[0]),
        of(scale, X, strong, donated=[1]),
        of(scale, X, strong, clip="two_pass"),
    ]
    assert len(set(marks)) == len(marks)


@pytest.mark.slow
def test_another_process_finds_the_same():
    """Nothing in it depends on addresses or the order of sets."""
    code = (
        "import jax.numpy as jnp; from tests.scheduling.test_fingerprint import *;"
        "print(of(chain, X, X))"
    )
    found = {
        subprocess.run(
            [sys.executable, "-c", code],
            env={**os.environ, "PYTHONHASHSEED": seed, "JAX_PLATFORMS": "cpu"},
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        for seed in ("1", "2")
    }
    assert found == {of(chain, X, X)}


def test_a_plan_for_another_donation_or_jax():
    step = lambda w, x: (
        w - 0.1 * jax.grad(lambda w: jnp.sum((x @ w) ** 2))(w),
        x.sum(),
    )
    plan = jaxmem.schedule(step, target="cpu", donate_argnums=0).plan(X * 1, X)
    w = X * 1
    np.testing.assert_allclose(
        jaxmem.schedule(step, plan=plan, donate_argnums=0)(w, X)[0], step(X, X)[0]
    )
    with pytest.raises(ValueError, match="donated arguments or another clip"):
        jaxmem.schedule(step, plan=plan, donate_argnums=())(X, X)

    old = dataclasses.replace(plan, jax_version="0.9.0")
    with pytest.raises(ValueError, match="made with jax 0.9.0, this is jax"):
        jaxmem.schedule(step, plan=old, donate_argnums=0)(X * 1, X)


def test_a_plan_of_a_sharded_step_holds_inside_of_another_jit():
    """Where no type names the mesh of the arguments, and the trace is another."""
    mesh = jax.make_mesh((8,), ("x",), (jax.sharding.AxisType.Auto,))
    sharding = jax.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    x = jax.device_put(jnp.ones((8, 8)), sharding)
    step = jax.grad(lambda w, x: (x @ w).astype(jnp.bfloat16).sum())
    plan = jaxmem.schedule(step, target="cpu", donate_argnums=()).plan(x, x)
    loaded = jaxmem.schedule(step, plan=plan, donate_argnums=())
    np.testing.assert_array_equal(jax.jit(loaded)(x, x), loaded(x, x))


def test_weak_types_have_a_search_of_their_own():
    """A Python number and an array of its dtype are traced apart."""
    scheduled = jaxmem.schedule(lambda x, s: x * s, target="cpu", donate_argnums=())
    half = X.astype(jnp.bfloat16)
    assert scheduled(half, 2.0).dtype == jnp.bfloat16
    with jax.numpy_dtype_promotion("standard"):
        assert scheduled(half, jnp.float32(2.0)).dtype == jnp.float32
