"""Without a target nobody compiles to compare: only what gains clearly is done."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from benchmarks.models import zoo
from benchmarks.models.transformers import StackConfig
from benchmarks.models.zoo_transformers import GPT2, Llama
from jaxmem import schedule
from jaxmem.scheduling._choice import Choice
from tests.scheduling import problem
from tests.scheduling.problem import array
from tests.scheduling.test_order import WIDE, barriers, momentum
from tests.scheduling.test_undonated import OPTIMIZERS, peak

pytestmark = pytest.mark.usefixtures("standard_jax")

SDS = jax.ShapeDtypeStruct


def scanned(name: str, layers: int, rows: int):
    """A step on 96 wide layers: a weight has 36 KiB, a residual 384 bytes a row."""
    tx, f32 = OPTIMIZERS[name], jnp.float32
    params = {
        "layers": problem.stack(layers, 96, dtype=f32),
        "head": array(96, 3, seed=3, dtype=f32),
    }
    args = params, tx.init(params), array(rows, 96, seed=4, dtype=f32)
    return problem.train_step(tx), args


def said(plan) -> list[str]:
    """What the plan says was left out since nobody could compare."""
    return [note for note in plan.notes if "name a target" in note]


# -- residuals of scanned layers


@pytest.mark.parametrize("name", ["sgd", "momentum"])
def test_few_rows_take_no_more_than_jit(name):
    """A stack of 6 x 5 rows is less than the weight that may be held once more."""
    step, args = scanned(name, layers=6, rows=5)
    scheduled = schedule(step, donate_argnums=())
    assert peak(scheduled, args) <= peak(step, args)


def test_the_plan_says_which_residuals_are_kept():
    step, args = scanned("sgd", layers=6, rows=5)
    plan = schedule(step, donate_argnums=()).plan(*args)
    assert plan.residual_bytes == 0
    (note,) = said(plan)
    # one stack of 6 x 5 x 96 numbers
    assert note.startswith("11.2 KiB of residuals are kept")
    assert "one more array of a layer, 36.0 KiB" in note


def test_residuals_of_more_than_an_array_of_a_layer_are_made():
    step, args = scanned("sgd", layers=6, rows=24)
    plan = schedule(step, donate_argnums=()).plan(*args)
    # jax 0.10 stacks one more that can be made than 0.12 does
    assert plan.residual_bytes in (6 * 24 * 96 * 4, 2 * 6 * 24 * 96 * 4)
    assert said(plan) == []


# -- barriers between layers that are written out


def written_out(rows: int):
    """Shapes of four layers of a MiB each, of which `momentum` is the step."""
    params = [SDS((WIDE, WIDE), jnp.float32)] * 4
    return params, params, SDS((rows, WIDE), jnp.float32)


def test_barriers_where_gradients_that_wait_are_most_of_it():
    scheduled = schedule(momentum, donate_argnums=(0, 1))
    plan = scheduled.plan(*written_out(2))
    assert plan.barriers == 3
    assert said(plan) == []


def test_no_barriers_where_activations_are_most_of_it():
    """8 MiB an activation: the peak is where the backward pass begins."""
    args = written_out(4096)
    scheduled = schedule(momentum, donate_argnums=(0, 1))
    assert barriers(scheduled.trace(*args).jaxpr) == []
    (note,) = said(scheduled.plan(*args))
    assert note.startswith("unrolled layers are not reordered")
    assert "would save 0 B of" in note


@pytest.mark.parametrize(("rows", "count"), [(2, 3), (4096, 0)])
def test_the_same_inside_a_loop_over_micro_batches(rows, count):
    def step(params, state, batches):
        def one(carry, x):
            params, state, value = momentum(*carry, x)
            return (params, state), value

        return jax.lax.scan(one, (params, state), batches)

    params, state, x = written_out(rows)
    batches = SDS((3, *x.shape), x.dtype)
    plan = schedule(step, donate_argnums=(0, 1)).plan(params, state, batches)
    assert plan.barriers == count
    assert len(said(plan)) == (not count)


def test_with_a_target_they_are_compared():
    scheduled = schedule(momentum, donate_argnums=(0, 1))
    found = scheduled.rewritten(Choice("h100"), *written_out(4096))
    assert len(barriers(found.jaxpr)) == 3
    assert found.notes == ()


class Net(nn.Module):
    """Convolutions, and a dense layer that has nearly all of the parameters."""

    @nn.compact
    def __call__(self, x):
        for _ in range(2):
            x = nn.relu(nn.Conv(16, (3, 3), strides=2)(x))
        x = nn.relu(nn.Dense(1024)(x.reshape(x.shape[0], -1)))
        return nn.Dense(10)(nn.relu(nn.Dense(1024)(x)))


def abstract_step(model: nn.Module, inputs):
    """A step of Adam on shapes, as the zoo has it."""
    tx = optax.adam(1e-3)
    state, logits = zoo.abstract(model, inputs, tx)
    labels = SDS(logits.shape[:-1], jnp.int32)
    return zoo.train_step(model, tx), (state, inputs, labels, zoo.KEY)


def test_no_barriers_where_they_are_larger_than_the_order_of_xla():
    step, args = abstract_step(Net(), SDS((1, 64, 64, 3), jnp.float32))
    scheduled = schedule(step, donate_argnums=(0,))
    assert barriers(scheduled.trace(*args).jaxpr) == []
    assert len(said(scheduled.plan(*args))) == 1


# -- the zoo, compiled for an H100

# XLA places each buffer at a multiple of 256 bytes, and numbers them in another order:
# that many of them may lie one place further.
PLACES = 32


def transformer(make, **sizes):
    config = StackConfig(3, 512, 8, dropout=0.0, **sizes)
    return lambda scan: abstract_step(make(config, scan), SDS((2, 128), jnp.int32))


TRANSFORMERS = {
    "gpt2": transformer(GPT2, kv_heads=8, hidden=2048),
    "llama": transformer(Llama, kv_heads=4, hidden=1536),
}
VISION = [name for name, one in zoo.ZOO.items() if not one.layered]
STEPS = {f"{name}, written out": lambda n=name: zoo.step(n)[:2] for name in VISION}
for _name, _make in TRANSFORMERS.items():
    STEPS[f"{_name}, written out"] = lambda make=_make: make(False)
    STEPS[f"{_name}, scanned"] = lambda make=_make: make(True)


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_a_model_of_the_zoo_takes_no_more_than_jit(name):
    step, args = STEPS[name]()
    how = {"target": "h100", "donate_argnums": (0,)}
    plain = jaxmem.estimate(step, *args, **how)
    ours = jaxmem.estimate(schedule(step, donate_argnums=(0,)), *args, **how)
    assert ours.peak_bytes <= plain.peak_bytes + PLACES * 256
