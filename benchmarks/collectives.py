"""What devices send each other in a step over 8 micro-batches, on 8 H100.

    python -m benchmarks.collectives

Eight layers of an MLP in `lax.scan`, 64 Mi parameters in float32, Adam; compiled, not
run. A collective counts as often as the step runs it.
"""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks._common import MIB, MS, publish, size_and_ms
from jaxmem.memory import MemoryReport
from jaxmem.memory.buffers import Collective, sent_bytes
from jaxmem.optim import accumulate_step, adama, apply_step, start_step

M, N, TARGET = 8, 8, "h100"
LAYERS, WIDTH, HIDDEN, TOKENS, LONG = 8, 1024, 4096, 512, 2048
SHOWN = ("all-reduce", "reduce-scatter", "all-gather")


@dataclass(frozen=True)
class Case:
    """A step, and where its arrays are.

    Attributes:
      what: how gradients are accumulated.
      under: what makes it work on many devices.
      tx: the gradient transformation, whose state it takes.
      step: of (params, state, batch).
      mesh: of 8 devices.
      params: how each parameter, and what the state has of it, is sharded.
      batch: how the batch is sharded.
      tokens: of an example.
    """

    what: str
    under: str
    tx: Any
    step: Callable
    mesh: Mesh
    params: P = P()
    batch: P = P("data")
    tokens: int = TOKENS


def loss(params, batch, rng=None):
    """Mean square of what the layers make of `batch`, [examples, tokens, WIDTH]."""
    del rng

    def layer(x, w):
        return x + jax.nn.gelu(x @ w[0]) @ w[1], None

    return jnp.mean(jnp.square(jax.lax.scan(layer, batch, params)[0]))


def split(batch):
    """Micro-batches along axis 0, of the examples of this device."""
    return batch.reshape(N, -1, *batch.shape[1:])


def summed(tx, every: bool, params, state, batch):
    """In shard_map: gradients are accumulated, and reduced each time or at the end."""
    own = params if every else jax.lax.pcast(params, "data", to="varying")

    def micro(total, batch):
        # with respect to replicated parameters jax.grad sums over the devices
        grads = jax.grad(loss)(own, batch)
        return jax.tree.map(lambda t, g: t + g / (M * N), total, grads), None

    total, _ = jax.lax.scan(micro, jax.tree.map(jnp.zeros_like, own), split(batch))
    grads = total if every else jax.lax.psum(total, "data")
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def folded(tx, params, state, batch):
    """In shard_map: AdamA with one reduction of its moments."""
    state, own = start_step(state, params, "data")

    def micro(state, batch):
        grads = jax.grad(loss)(own, batch)
        return accumulate_step(tx, grads, state, params, micro_batches=N), None

    state, _ = jax.lax.scan(micro, state, split(batch))
    updates, state = apply_step(tx, state, params)
    return optax.apply_updates(params, updates), state


def cases() -> Iterator[Case]:
    adam, own = optax.adam(1e-3), adama(1e-3, axis_name="data")
    mesh = jaxmem.target_mesh(TARGET, (M,), ("data",))
    mapped = functools.partial(_mapped, mesh)
    for what, tx, run, check_vma in (
        ("accumulation, one reduction", adam, _of(summed, adam, False), True),
        ("accumulation, one a micro-batch", adam, _of(summed, adam, True), True),
        ("AdamA", own, _of(folded, own), True),
        # takes gradients of its own parameters: no types that tell devices apart
        ("AdamA, microbatch", own, _microbatched(own), False),
    ):
        yield Case(what, "shard_map", tx, mapped(run, check_vma), mesh)
    both = jaxmem.target_mesh(TARGET, (2, 4), ("data", "fsdp"))
    rows, columns = P(("data", "fsdp")), P(None, "fsdp")
    for under, *where in (
        ("jit, data parallel", mesh),
        ("jit, FSDP", mesh, P(None, "data")),
        ("jit, data 2 x FSDP 4", both, columns, rows),
        (f"jit, data 2 x FSDP 4, {LONG} tokens", both, columns, rows, LONG),
    ):
        for what, tx in (("accumulation", adam), ("AdamA", adama(1e-3))):
            step = _microbatched(tx)
            yield Case(f"{what}, microbatch", under, tx, step, *where)
    for under, *where in (
        ("jit, data parallel, mesh=", mesh),
        ("jit, data 2 x FSDP 4, mesh=", both, columns, rows),
        (f"jit, data 2 x FSDP 4, {LONG} tokens, mesh=", both, columns, rows, LONG),
    ):
        for what, tx in (("accumulation", adam), ("AdamA", own)):
            step = _microbatched(tx, axis_name="data", mesh=where[0])
            yield Case(f"{what}, microbatch", under, tx, step, *where)


_of = functools.partial


def _microbatched(tx, **how):
    step = jaxmem.microbatch(loss, tx, N, **how)
    return lambda params, state, batch: step(params, state, batch, None)[:2]


def _mapped(mesh, step, check_vma):
    specs = P(), P(), P("data")
    return jax.shard_map(
        step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma
    )


def arguments(case: Case):
    """Shapes and shardings of the parameters, the state and a batch of M N examples."""

    def struct(shape, spec, dtype=jnp.float32):
        where = NamedSharding(case.mesh, spec)
        return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

    shapes = ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH))
    params = tuple(struct(shape, case.params) for shape in shapes)
    state = jax.tree.map(
        lambda x: struct(x.shape, case.params if x.ndim else P(), x.dtype),
        jax.eval_shape(case.tx.init, params),
    )
    return params, state, struct((M * N, case.tokens, WIDTH), case.batch)


def compiled(
    fn, *args, donate: Sequence[int] = (0, 1)
) -> tuple[tuple[Collective, ...], int]:
    """(collectives, temporary bytes) of the step with parameters and state donated."""
    report = report_of(fn, *args, donate=donate)
    return report.collectives, report.temp_bytes


def report_of(fn, *args, donate: Sequence[int] = (0, 1)) -> MemoryReport:
    how = {"target": TARGET, "donate_argnums": donate, "timeout": 600.0}
    return jaxmem.estimate(fn, *args, **how)


def row(case: Case):
    report = report_of(case.step, *arguments(case))
    found = [c for c in report.collectives if c.bytes > 4]  # not the loss
    runs = lambda kind: sum(c.times for c in found if c.kind == kind)
    inside = sum(c.times for c in found if c.loops)
    counts = [runs(kind) for kind in SHOWN]
    sent = sent_bytes(found) / MIB
    return case.what, case.under, *counts, inside, sent, *size_and_ms(report)


if __name__ == "__main__":
    head = ("step", "under", *SHOWN, "of these in loops", "MiB sent", "temp MiB", MS)
    publish("collectives", head, [row(case) for case in cases()])
