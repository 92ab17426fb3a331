"""What a step may do to nnx objects, and what of it a scheduled step carries."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from tests.frameworks.forms import TX, D, Nnx, X, mean_square, nnx_args, nnx_step
from tests.frameworks.stacks import stack_args, step

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:no argument is donated"),
]


def leaves(*objects):
    """All arrays of some objects, keys as the integers they are."""
    state = nnx.as_pure(nnx.state(objects))
    data = lambda x: (
        jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    )
    return jax.tree.map(lambda x: np.asarray(data(x)), state)


def checked(step, make, *batch, calls=3, **options):
    """Runs a step as nnx.jit compiles it and scheduled; state and results are equal."""
    donate = options.get("donate_argnums", ())
    reference = nnx.jit(step, donate_argnums=donate)
    want_objects, got_objects = make(), make()
    scheduled = jaxmem.schedule(step, **options)
    for _ in range(calls):
        want = reference(*want_objects, *batch)
        got = scheduled(*got_objects, *batch)
        jax.tree.map(np.testing.assert_array_equal, leaves(want), leaves(got))
        jax.tree.map(
            np.testing.assert_array_equal, leaves(want_objects), leaves(got_objects)
        )
    return got_objects, got


class Full(nnx.Module):
    """Dropout, whose counter advances; batch statistics; a shared layer."""

    def __init__(self, rngs):
        self.first = nnx.Linear(D, D, rngs=rngs)
        self.norm = nnx.BatchNorm(D, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = self.first
        self.calls = nnx.Variable(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.calls[...] += 1
        x = self.dropout(nnx.relu(self.norm(self.first(x))))
        return self.second(x)


def full():
    model = Full(nnx.Rngs(0))
    return model, nnx.Optimizer(model, TX, wrt=nnx.Param)


@pytest.mark.fast("donated")
@pytest.mark.parametrize("donate", [(), (0, 1)], ids=["kept", "donated"])
def test_dropout_statistics_counters_and_shared_layers(donate):
    (model, _), _ = checked(step, full, X, donate_argnums=donate)
    assert int(model.calls[...]) == 3
    assert int(model.dropout.rngs.count[...]) == 3
    assert model.first is model.second
    assert np.abs(model.norm.mean[...]).sum() > 0


def test_donation_of_nnx_jit_is_read():
    model, optimizer = full()
    scheduled = jaxmem.schedule(nnx.jit(step, donate_argnums=(0, 1)))
    before = model.first.kernel[...]
    scheduled(model, optimizer, X)
    assert before.is_deleted()
    scheduled(model, optimizer, X)  # nothing that is deleted is left in the objects
    report = jaxmem.estimate(scheduled, model, optimizer, X)
    assert report.alias_bytes >= 3 * D * D * 4


def test_static_arguments_of_nnx_jit_are_read():
    def step(model, power, x):
        return mean_square(model(x)) ** power

    static = nnx.jit(step, static_argnums=1)
    got = jaxmem.schedule(static)(Nnx(nnx.Rngs(0)), 2, X)
    np.testing.assert_array_equal(got, static(Nnx(nnx.Rngs(0)), 2, X))


class State(NamedTuple):
    model: nnx.Module
    optimizer: nnx.Optimizer
    metrics: nnx.MultiMetric
    count: int


def train_state():
    model, optimizer = full()
    metrics = nnx.MultiMetric(loss=nnx.metrics.Average("loss"))
    return (State(model, optimizer, metrics, 1),)


def test_a_tuple_of_objects_and_metrics():
    def of_state(state, x):
        loss = step(state.model, state.optimizer, x)
        state.metrics.update(loss=loss)
        return {"loss": loss, "count": state.count + 1}

    (state,), _ = checked(of_state, train_state, X)
    assert np.isfinite(state.metrics.compute()["loss"])


def test_rngs_alone():
    draw = lambda rngs, x: x + jax.random.normal(rngs.noise(), x.shape)
    (rngs,), _ = checked(draw, lambda: (nnx.Rngs(noise=1),), X)
    assert int(rngs.noise.count[...]) == 3


def test_one_object_twice():
    both = lambda one, other, x: step(one, other.optimizer, x) + other.model(x).sum()

    class Holder(nnx.Module):
        def __init__(self, model, optimizer):
            self.model, self.optimizer = model, optimizer

    def make():
        model, optimizer = full()
        return model, Holder(model, optimizer)

    (model, holder), _ = checked(both, make, X)
    assert holder.model is model


def test_an_object_that_is_returned_is_the_users():
    def replaced(model, x):
        model.first.kernel[...] *= 0.5
        return model, nnx.Linear(D, 1, rngs=nnx.Rngs(0)), x.sum()

    model = Full(nnx.Rngs(0))
    got, made, _ = jaxmem.schedule(replaced)(model, X)
    assert got is model
    assert made(X).shape == (X.shape[0], 1)


def test_attributes_that_appear():
    class Grows(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(D, D, rngs=rngs)

        def __call__(self, x):
            self.seen = nnx.Intermediate(x.sum())
            return self.layer(x)

    model = Grows(nnx.Rngs(0))
    jaxmem.schedule(lambda model, x: model(x))(model, X)
    np.testing.assert_allclose(model.seen[...], X.sum(), rtol=1e-6)


def test_what_stays_as_it_is_is_no_output():
    def frozen(model, x):
        model.calls[...] += 1
        return model.first(x).sum()

    model = Full(nnx.Rngs(0))
    kernel = model.first.kernel[...]
    lowered = jaxmem.schedule(frozen).lower(model, X)
    assert len(jax.tree.leaves(lowered.out_info)) == 2
    jaxmem.schedule(frozen)(model, X)
    assert model.first.kernel[...] is kernel
    assert int(model.calls[...]) == 1


@pytest.mark.parametrize(
    "jit",
    [nnx.jit, pytest.param(lambda f: f, marks=pytest.mark.slow)],
    ids=["nnx.jit", "as it is"],
)
def test_scanned_layers_are_released(jit):
    """Each layer of the objects is updated as soon as its gradient is there."""

    def make():
        return stack_args()[:2]

    scheduled = jaxmem.schedule(jit(step), donate_argnums=(0, 1))
    (model, optimizer), (want, reference) = make(), make()
    plan = scheduled.plan(model, optimizer, X)
    stacked = nnx.state(model.layers, nnx.Param)
    assert plan.kept_bytes == 0
    assert plan.released_bytes == sum(x.nbytes for x in jax.tree.leaves(stacked))
    got = [float(scheduled(model, optimizer, X)) for _ in range(3)]
    plain = [float(nnx.jit(step)(want, reference, X)) for _ in range(3)]
    # sums of some 100 float32 products in another order, three Adam steps on
    assert got == pytest.approx(plain, rel=1e-5)
    assert plain[2] < plain[0]


@pytest.mark.slow
def test_a_budget():
    """The search compiles the step with its objects, and what it finds trains."""

    def make():
        return stack_args()[:2]

    model, optimizer = make()
    plain = jaxmem.estimate(step, model, optimizer, X, donate_argnums=(0, 1))
    scheduled = jaxmem.schedule(
        step, plain.peak_bytes - 1024, target="cpu", donate_argnums=(0, 1)
    )
    got = [float(scheduled(model, optimizer, X)) for _ in range(2)]
    want, reference = make()
    assert got == pytest.approx(
        [float(nnx.jit(step)(want, reference, X)) for _ in range(2)], rel=1e-5
    )
    assert scheduled.plan(model, optimizer, X).scheduled.peak_bytes < plain.peak_bytes


def test_what_is_closed_over_and_updated_is_named():
    model, optimizer = full()
    other = Full(nnx.Rngs(1))

    def closed(x):
        return step(model, optimizer, x) + other.first(x).sum()

    with pytest.raises(ValueError, match=r"closed updates `model` \(Full\)"):
        jaxmem.schedule(closed)(X)

    class Trainer:
        def __init__(self):
            self.model, self.optimizer = full()

        def step(self, x):
            self.model.calls[...] += 1
            return x

    with pytest.raises(ValueError, match=r"`self.model` \(Full\), which it closes"):
        jaxmem.schedule(Trainer().step)(X)
    with pytest.raises(ValueError, match="must be one of its arguments"):
        jaxmem.estimate(nnx.jit(closed), X)
    # what is read alone may be closed over
    assert jaxmem.schedule(lambda x: other.first(x))(X).shape == X.shape


def test_abstract_objects():
    """Nothing need be allocated for an estimate."""
    objects = nnx.eval_shape(lambda: nnx_args()[:2])
    report = jaxmem.estimate(nnx_step, *objects, X, donate_argnums=(0, 1))
    assert report.alias_bytes >= 3 * 2 * D * D * 4
    assert any("model.layers[0].kernel" in h.name for h in report.at_peak)


def test_eval_shape_leaves_the_objects():
    objects = full()
    before = leaves(*objects)
    shape = jaxmem.schedule(step).eval_shape(*objects, X)
    assert shape.shape == ()
    jax.tree.map(np.testing.assert_array_equal, before, leaves(*objects))
