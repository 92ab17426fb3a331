"""Optimizer state in the host's memory: where it is, and what moves."""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from jaxmem.optim import abstract_state, adam, adama, came, on_host
from tests.arrays import array
from tests.optim.test_battery import batch, loss, params, train_step

HOST = jax.memory.Space.Host


def made():
    tx, given = on_host(adama(1e-2)), params()
    return tx, (given, tx.init(given))


def nbytes(tree):
    return sum(x.nbytes for x in jax.tree.leaves(tree) if x.ndim)


def test_the_state_is_made_there_and_stays():
    tx, state = made()
    step = jaxmem.schedule(train_step(tx), donate_argnums=0)
    for seed in range(2):
        for x in jax.tree.leaves(state[1]):
            assert x.sharding.memory_kind == ("pinned_host" if x.ndim else "device")
        state, _ = step(state, batch(seed=seed))


def test_a_layer_is_fetched_at_a_time():
    """Inside the backward scan; nothing fetches the whole stack."""
    tx, state = made()
    step = jaxmem.schedule(train_step(tx), donate_argnums=0)
    text = str(step.trace(state, batch()).jaxpr)
    whole = [line for line in text.splitlines() if "device_put" in line]
    assert whole and not any("f32[3,32,64]" in line.split("=")[0] for line in whole)
    plan = step.plan(state, batch())
    assert plan.host_traffic_bytes == 2 * nbytes(state[1])
    assert plan.host_seconds > 0 and "host memory" in str(plan)
    assert jaxmem.scheduling.Plan.from_json(plan.to_json()) == plan


def test_the_link_is_that_of_the_chip_compiled_for():
    """Of a plan made for the CPU, and of the same plan compiled for a TPU v5e."""
    tx, state = made()
    plan = jaxmem.schedule(train_step(tx), donate_argnums=0).plan(state, batch())
    there = dataclasses.replace(plan, target="tpu-v5e")
    # of the 16e9 bytes a second of 16 lanes of PCI Express 3, copies reach 0.8
    seconds = plan.host_traffic_bytes / (0.8 * 16e9)
    assert there.host_seconds == pytest.approx(seconds, rel=1e-12)
    assert "the link of cpu" in str(plan) and "the link of tpu-v5e" in str(there)


def test_the_ledger_has_it_on_the_host():
    tx, (given, state) = made()
    found = jaxmem.ledger(given, tx)
    assert found.host_bytes == nbytes(state) and found.bytes_of("moments") == 0


@pytest.mark.parametrize(
    "init",
    [on_host(optax.sgd(0.1)).init, adam(0.1, bits=32, on_host=True).init],
    ids=["wrap", "adam"],
)
def test_backends_without_the_memory_are_named(init, monkeypatch):
    class Memory:
        kind = "device"

    class Device:
        platform = "banana"
        addressable_memories = staticmethod(lambda: [Memory()])

    monkeypatch.setattr(jax, "devices", lambda *_: [Device()])
    with pytest.raises(ValueError, match="banana has the memories device"):
        init(params())


def test_shapes_say_where_they_lie():
    tx, (given, state) = made()
    shapes = abstract_state(tx, jax.eval_shape(lambda: given))
    for shape, x in zip(*map(jax.tree.leaves, (shapes, state)), strict=True):
        assert (shape.shape, shape.dtype) == (x.shape, x.dtype)
        assert (shape.sharding is not None) == (x.sharding.memory_kind == "pinned_host")
    step = jaxmem.schedule(train_step(tx), donate_argnums=0)
    plan = step.plan((given, shapes), batch())
    assert plan.host_traffic_bytes == 2 * nbytes(state)


@pytest.mark.slow
def test_shapes_of_a_sharded_state_are_sharded():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    place = {"layers": P(None, "data"), "w": P("data"), "b": P()}
    given = {
        k: jax.device_put(x, NamedSharding(mesh, place[k])) for k, x in params().items()
    }
    for tx in (on_host(adama(1e-2)), on_host(adam(1e-2, bits=8)), came(1e-2)):
        shapes, state = abstract_state(tx, given), tx.init(given)
        for shape, x in zip(*map(jax.tree.leaves, (shapes, state)), strict=True):
            if isinstance(x.sharding, NamedSharding) and x.size > 1:
                assert shape.sharding.is_equivalent_to(x.sharding, x.ndim), x.sharding
                assert shape.sharding.memory_kind == x.sharding.memory_kind
    tx = on_host(adama(1e-2))
    step = jaxmem.schedule(train_step(tx), donate_argnums=0)
    args = (given, abstract_state(tx, given)), batch()
    report, plan = jaxmem.estimate(step, *args), step.plan(*args)
    of_one = lambda tree: jax.tree.map(lambda x: x.addressable_shards[0].data, tree)
    parts = of_one(given)
    assert 0 <= report.argument_bytes - 3 * nbytes(parts) <= batch().nbytes + 2**8
    own = 2 * nbytes(of_one(tx.init(given)))
    # a device may write its part alone of the two moments of "b", which are whole
    assert own - 2 * given["b"].nbytes <= plan.host_traffic_bytes <= own


def test_rows_of_an_embedding_go_in_chunks():
    """No array of the whole leaf is on the device, and the values are the same."""
    rows, width = 4096, 512
    r = np.random.default_rng(0)
    p, g = (array(r.standard_normal((rows, width)), jnp.float32) for _ in "pg")
    tx, plain = adam(1e-2, bits=32, on_host=True), adam(1e-2, bits=32)
    step = lambda tx: jax.jit(lambda g, s: tx.update(g, s, None))
    got, state = step(tx)(g, tx.init(p))
    want, _ = step(plain)(g, plain.init(p))
    np.testing.assert_allclose(got, want, rtol=1e-6)
    assert state[0].mu.sharding.memory_kind == "pinned_host"
    text = str(jax.make_jaxpr(lambda g, s: tx.update(g, s, None))(g, tx.init(p)))
    moves = [x for x in text.splitlines() if "device_put" in x]
    assert moves and not any(f"f32[{rows},{width}] = device_put" in x for x in moves)


def state_first(tx):
    """The step with the state before the parameters, which it returns first."""

    def step(opt_state, params, batch):
        (params, opt_state), _ = train_step(tx)((params, opt_state), batch)
        return params, opt_state

    return step


@pytest.mark.parametrize("donated", [0, (0, 1)], ids=["state", "both"])
@pytest.mark.parametrize(
    "tx",
    [on_host(adama(1e-2)), adam(1e-2, bits=32, on_host=True)],
    ids=["wrap", "adam"],
)
def test_donation_across_memories_is_refused(tx, donated):
    """JAX would give the moments' buffers to the parameters, and XLA:CPU abort."""
    given = params()
    step = jaxmem.schedule(state_first(tx), donate_argnums=donated)
    names = r"argument \[0\].*\.mu\['\w+'\] is donated and lies in pinned_host"
    with pytest.raises(ValueError, match=f"{names}.*donate the parameters together"):
        step(tx.init(given), given, batch())
    with pytest.raises(ValueError, match=names):
        step.plan(tx.init(given), given, batch())


def test_the_state_alone_is_donated_on_several_devices():
    """There XLA says which buffers are reused, and knows their memories."""
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    everywhere = NamedSharding(mesh, P())
    tx, given = on_host(adama(1e-2)), jax.device_put(params(), everywhere)
    want, _ = jax.jit(state_first(tx))(tx.init(given), given, batch())
    step = jaxmem.schedule(state_first(tx), donate_argnums=0)
    got, state = step(tx.init(given), given, batch())
    chex.assert_trees_all_close(got, want, rtol=1e-5)
    assert state[0].mu["w"].sharding.memory_kind == "pinned_host"


def test_micro_batches_keep_the_order():
    tx, (given, state) = made()
    step = jaxmem.microbatch(loss, tx, 2)
    for seed in range(2):
        given, state, _ = step(given, state, batch(seed=seed), None)
    assert state[0].mu["w"].sharding.memory_kind == "pinned_host"
