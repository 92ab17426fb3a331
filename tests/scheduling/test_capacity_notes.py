"""What a plan says of rows that are there for tokens that may not come."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks.models.moe import BOTH, DATA, EXPERT, gelu_mlp, mapped, ragged_shards
from benchmarks.steps.devices import placed
from jaxmem.memory import format_bytes
from jaxmem.scheduling.plan.capacity import capacity_notes
from tests.memory.test_estimate import needs_tpu

TOKENS = 512
ROWS = 4 * TOKENS * 2  # tokens of four devices, for two experts each
SDS = jax.ShapeDtypeStruct


def step_on(mesh, experts: P | None):
    mixer = mapped(mesh, lambda x, w: ragged_shards(gelu_mlp, x, w), BOTH, experts)

    def loss(w, x):
        def layer(x, w):
            y, more = mixer(x, w)
            return x + y, more

        y, more = lax.scan(layer, x, w)
        return jnp.square(y).mean() + more.mean()

    def step(w, x):
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, jax.grad(loss)(w, x))

    shapes = {"router": (3, 128, 8), "up": (3, 8, 128, 256), "down": (3, 8, 256, 128)}
    w = {name: SDS(shape, jnp.float32) for name, shape in shapes.items()}
    spread = lambda name, _: P() if name == "router" else P(None, experts)
    x = SDS((8, TOKENS, 128), jnp.float32)
    return step, (placed(mesh, w, spread), placed(mesh, x, lambda *_: P(BOTH)))


@pytest.fixture
def mesh():
    return jaxmem.target_mesh("tpu-v5e", (2, 4), (DATA, EXPERT))


def capacities(plan):
    return [note for note in plan.notes if "capacity" in note]


def test_room_for_every_choice_is_told(mesh):
    step, args = step_on(mesh, EXPERT)
    (note,) = capacities(jaxmem.schedule(step, donate_argnums=0).plan(*args))
    assert f"ragged_dot has {ROWS:,} rows" in note
    # a quarter of them, and 1.25 times as many
    assert "1,024 are used" in note and "1,280 rows" in note and "69% smaller" in note


@needs_tpu
def test_bytes_are_those_of_the_compiled_step(mesh):
    step, args = step_on(mesh, EXPERT)
    report = jaxmem.estimate(step, *args, target="tpu-v5e", donate_argnums=0)
    (note,) = capacity_notes(jax.make_jaxpr(step)(*args), report)
    rows = [b.bytes for b in report.at_peak if ROWS in b.shape]
    assert rows
    assert f"about {format_bytes(round(sum(rows) * (1 - 1280 / ROWS)))}" in note


def test_devices_that_have_all_experts_have_no_room_to_spare(mesh):
    step, args = step_on(mesh, None)
    assert not capacities(jaxmem.schedule(step, donate_argnums=0).plan(*args))
