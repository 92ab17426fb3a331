"""Static and donated arguments, methods, and what a jitted step says of itself."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import export

import jaxmem
from jaxmem.frameworks import jitted, pure_call
from tests.arrays import array

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:no argument is donated"),
]
X = jnp.arange(6.0).reshape(2, 3)


def times(x, n):
    return (x * int(n)).sum()


@pytest.mark.parametrize("n", [3, np.int64(3), np.float32(3), True])
@pytest.mark.parametrize(
    "make",
    [
        lambda f: jaxmem.schedule(f, static_argnums=1),
        lambda f: jaxmem.schedule(f, static_argnums=-1),
        lambda f: jaxmem.schedule(f, static_argnames="n"),
        lambda f: jaxmem.schedule(jax.jit(f, static_argnums=1)),
        lambda f: jaxmem.schedule(jax.jit(f, static_argnames="n")),
    ],
)
def test_static_arguments_keep_their_values(make, n):
    assert float(make(times)(X, n)) == 15.0 * int(n)
    assert float(make(times)(X, n=n)) == 15.0 * int(n)


def test_a_static_argument_that_has_shape_and_dtype():
    zeros = lambda x, like: jnp.zeros(like.shape, like.dtype) + x.sum()
    like = jax.ShapeDtypeStruct((4,), jnp.float32)
    scheduled = jaxmem.schedule(zeros, static_argnums=1)
    assert scheduled(X, like).shape == (4,)
    assert scheduled(X, jax.ShapeDtypeStruct((5,), jnp.float32)).shape == (5,)
    assert jaxmem.estimate(zeros, X, like, static_argnums=1).argument_bytes == X.nbytes


def test_scalars_beside_a_static_one():
    step = jax.jit(lambda x, a, n: (x * a).sum() * int(n), static_argnames="n")
    assert float(jaxmem.schedule(step)(X, 2.0, 3)) == 90.0
    assert float(jaxmem.schedule(step)(X, 2, n=3)) == 90.0
    report = jaxmem.estimate(step, X, 2.0, 3)
    assert report.argument_bytes == X.nbytes + 4


def test_static_values_are_told_apart():
    scheduled = jaxmem.schedule(times, static_argnums=1)
    assert [float(scheduled(X, n)) for n in (1, 2, 1)] == [15.0, 30.0, 15.0]


def test_a_static_argument_without_hash():
    with pytest.raises(TypeError, match=r"static argument 1 is \[1\], which has no"):
        jaxmem.schedule(times, static_argnums=1)(X, [1])


class Trainer:
    """Steps that are methods."""

    def __init__(self, factor):
        self.factor = factor

    def step(self, x):
        return (x * self.factor).sum()

    @functools.partial(jaxmem.schedule, static_argnums=0)
    def scheduled(self, x):
        return (x * self.factor).sum()


def test_methods():
    trainer = Trainer(2)
    assert float(jaxmem.schedule(trainer.step)(X)) == 30.0
    assert jaxmem.schedule(trainer.step, target="cpu").plan(X).scheduled is not None
    assert float(trainer.scheduled(X)) == 30.0
    assert float(Trainer(3).scheduled(X)) == 45.0
    assert float(Trainer.scheduled(trainer, X)) == 30.0


def test_donation_by_position_of_what_is_passed_by_name():
    step = lambda params, x: params * x.sum()
    params = jnp.ones((3,))
    jaxmem.schedule(step, donate_argnums=0)(x=X, params=params)
    assert params.is_deleted()
    params = jnp.ones((3,))
    jaxmem.schedule(step, donate_argnames="params")(params, X)
    assert params.is_deleted()
    params = jnp.ones((3,))
    jaxmem.schedule(jax.jit(step, donate_argnums=0))(params, x=X)
    assert params.is_deleted()


def test_donation_behind_a_static_argument():
    step = lambda n, params, x: params * x.sum() * n
    params = jnp.ones((3,))
    jaxmem.schedule(step, static_argnums=0, donate_argnums=1)(2, params, X)
    assert params.is_deleted() and not X.is_deleted()
    report = jaxmem.estimate(
        step, 2, jnp.ones((3,)), X, static_argnums=0, donate_argnums=1
    )
    assert report.alias_bytes == 12


def test_places_that_are_no_arguments():
    with pytest.raises(ValueError, match="donate_argnums=5: the call has 2"):
        jaxmem.schedule(times, donate_argnums=5)(X, 2)
    with pytest.raises(ValueError, match="static_argnames='m': the call has 2"):
        jaxmem.schedule(times, static_argnames="m")(X, 2)
    with pytest.raises(ValueError, match="are donated and static"):
        jaxmem.schedule(times, donate_argnums=1, static_argnums=1)(X, 2)


def scanned(w, x):
    def loss(w):
        return jnp.mean(
            jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0] ** 2
        )

    value, grad = jax.value_and_grad(loss)(w)
    return w - 0.1 * grad, value


@pytest.mark.fast("jit")
@pytest.mark.parametrize("wrap", [jax.jit, lambda f: f], ids=["jit", "as it is"])
def test_export_with_a_symbolic_batch(wrap):
    """Decisions take a symbolic size as a number; the program holds for all."""
    (rows,) = export.symbolic_shape("rows")
    w = array(np.random.default_rng(0).normal(size=(3, 3, 3)), jnp.float32)
    x = jax.ShapeDtypeStruct((rows, 3), jnp.float32)
    exported = export.export(wrap(jaxmem.schedule(scanned)))(w, x)
    for n in (2, 5):
        batch = jnp.ones((n, 3))
        want, got = scanned(w, batch), exported.call(w, batch)
        jax.tree.map(
            functools.partial(np.testing.assert_allclose, rtol=1e-6), want, tuple(got)
        )
    with pytest.raises(ValueError, match="symbolic shape"):
        jaxmem.schedule(scanned).plan(w, x)
    with pytest.raises(ValueError, match="symbolic shape"):
        jaxmem.estimate(scanned, w, x)


def test_what_jitted_steps_say_of_themselves():
    """Where jax, flax and equinox keep it; a new version that moves it fails here."""
    step = lambda state, x, n: state
    found = jitted(jax.jit(step, donate_argnums=0, static_argnames="n"), (), {})
    assert set(found.donated) == {0, "state"}
    assert set(found.static) == {2, "n"}
    options = {"xla_cpu_enable_fast_math": True}
    assert jitted(jax.jit(step, compiler_options=options), (), {}).compiler_options == {
        "xla_cpu_enable_fast_math": True
    }
    for graph in (True, False):
        of_nnx = nnx.jit(step, donate_argnums=(0, 1), static_argnums=2, graph=graph)
        found = jitted(of_nnx, (), {})
        assert {0, 1} <= set(found.donated) and 2 in found.static
    donated = {
        how: set(jitted(eqx.filter_jit(step, donate=how), (), {}).donated)
        for how in ("none", "all", "all-except-first", "warn-except-first")
    }
    assert donated["none"] == set()
    assert donated["all"] == {0, 1, 2}
    assert donated["all-except-first"] == donated["warn-except-first"] == {1, 2}
    assert jitted(step, (), {}) is None


def test_donation_of_filter_jit():
    step = eqx.filter_jit(lambda x, y: x + y, donate="all-except-first")
    x, y = X * 1, X * 2
    jaxmem.schedule(step)(x, y)
    assert y.is_deleted() and not x.is_deleted()


def test_static_leaves_of_equinox():
    """What is no array keeps its type: a flag decides, a rate is no tracer."""

    @eqx.filter_jit
    def step(model, x, double=False, name="sum"):
        x = jax.vmap(model)(x)
        out = x.sum() if name == "sum" else x.mean()
        return (out * 2 if double else out), name

    model = eqx.nn.Linear(3, 3, key=jax.random.key(0))
    scheduled = jaxmem.schedule(step)
    for options in ({}, {"double": True}, {"name": "mean"}):
        want, got = step(model, X, **options), scheduled(model, X, **options)
        assert got[1] == want[1]
        np.testing.assert_allclose(got[0], want[0], rtol=1e-6)


def test_a_plain_call_is_left_as_it_is():
    with pure_call(times, (X, 2), {}) as call:
        assert call.form.as_it_is and call.args == (X, 2)
    lowered = jaxmem.schedule(scanned).lower(jnp.ones((2, 3, 3)), X)
    new, loss = lowered.compile()(jnp.ones((2, 3, 3)), X)
    assert new.shape == (2, 3, 3) and loss.shape == ()
