"""Steps that `schedule` and `microbatch` make have forms that are not hit."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.faults import FAULTS, WHAT_IS_DONE, TracedProgram, findings_in_program
from jaxmem.ir import jaxprs
from tests.faults import programs
from tests.memory.test_estimate import needs_h100

SUMS = next(fault for fault in FAULTS if fault.report == "xla#49143")
HAS, HAS_NOT = SUMS.affected[1], SUMS.looked_at[-1]


def sums_in(step, args) -> int:
    """How many sums of tables a traced step has that would be hit."""
    closed = step.trace(*args).jaxpr
    return len(list(findings_in_program(TracedProgram(closed, devices=4), [SUMS])))


def arrays(case, devices=4):
    """Arguments of a sum of tables: whole numbers, whose sums are exact."""
    mesh = jax.sharding.Mesh(jax.devices()[:devices], ("data",))
    draw = np.random.default_rng(0)
    ids = draw.integers(0, programs.VOCABULARY, case.args[1].shape)
    cotangents = draw.integers(-4, 5, case.args[2].shape)
    place = lambda x, *axes: jax.device_put(x, NamedSharding(mesh, P(*axes)))
    return (
        place(np.zeros(case.args[0].shape, np.float32)),
        place(ids.astype(np.int32), "data"),
        place(cotangents.astype(np.float32), "data"),
    )


@pytest.fixture(params=[False, True], ids=["into zeros", "into the sum"])
def case(request):
    mesh = jaxmem.target_mesh("h100", (4,), ("data",))
    return programs.summed_tables(mesh, direct=request.param)


def test_sums_of_tables_are_kept_apart(case, of_version):
    of_version(*HAS)
    args = arrays(case)
    assert sums_in(jax.jit(case.step), args) == 1
    step = jaxmem.schedule(case.step, donate_argnums=())
    assert sums_in(step, args) == 0
    assert WHAT_IS_DONE in step.plan(*args).notes
    np.testing.assert_array_equal(step(*args), jax.jit(case.step)(*args))


def test_they_are_left_where_nothing_is_lost(case, of_version):
    """On one device, and by a version that is right."""
    for version, devices in ((HAS, 1), (HAS_NOT, 4)):
        of_version(*version)
        args = arrays(case, devices)
        step = jaxmem.schedule(case.step, donate_argnums=())
        assert sums_in(step, args) == 1
        assert WHAT_IS_DONE not in step.plan(*args).notes


def test_in_another_function_they_are_kept_apart(case, of_version):
    """There nobody knows where the arguments are."""
    args = arrays(case, 1)
    for version, left in ((HAS, 0), (HAS_NOT, 1)):
        of_version(*version)
        step = jaxmem.schedule(case.step, donate_argnums=())
        outer = jax.jit(lambda *args, step=step: step(*args))
        assert sums_in(outer, args) == left


def loss(params, batch, rng):
    rows = params["table"][batch["ids"]]
    return jnp.mean(jnp.sum((rows - batch["rows"]) ** 2, axis=-1))


@pytest.mark.parametrize("tx", [optax.sgd(0.1), optax.adam(0.1), jaxmem.adama(0.1)])
def test_micro_batches_scale_what_they_add(tx):
    """So that XLA does not add the rows right into the sum."""
    params = {"table": jnp.zeros((programs.VOCABULARY, 8))}
    batch = {"ids": jnp.zeros((8, 4), jnp.int32), "rows": jnp.ones((8, 4, 8))}
    step = jaxmem.microbatch(loss, tx, 4)
    args = params, tx.init(params), batch, None
    closed = jax.make_jaxpr(step)(*args)
    assert any(e.primitive.name == "scatter-add" for e in jaxprs.walk(closed))
    assert not list(findings_in_program(TracedProgram(closed, devices=4), [SUMS]))


@needs_h100
@pytest.mark.slow
def test_what_is_scheduled_is_compiled_right(case):
    """The module of the plain step has the fault where this version of XLA has it."""
    plain = jaxmem.audit(case.step, *case.args, target="h100")
    affected = jaxmem.faults.standing(SUMS, "cuda") == "affected"
    assert _has_sums(plain) == affected
    step = jaxmem.schedule(case.step, donate_argnums=())
    assert not _has_sums(jaxmem.audit(step, *case.args, target="h100"))


def _has_sums(audited) -> bool:
    return any(finding.report == SUMS.address for finding in audited)
