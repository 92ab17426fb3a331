"""What devices send each other in a step over 8 micro-batches, on 8 H100.

    python -m benchmarks.collectives

Eight layers of an MLP in `lax.scan`, 64 Mi parameters in float32, Adam; compiled, not
run. Collectives are counted as often as the step runs them, which is said by the trip
counts of the loops around them. Of a ring, as NCCL has it, a device sends (M-1)/M of
the whole array in an all-gather or a reduce-scatter, and twice that in an all-reduce.
"""

import functools
import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxmem
from benchmarks._common import MIB, publish
from jaxmem.chips import get_target
from jaxmem.frameworks import pure_call
from jaxmem.memory.buffers import Hlo, Instruction, parse_hlo
from jaxmem.memory.compile import compile_program, flat_function, flatten_call, trace
from jaxmem.optim import accumulate_step, adama, apply_step, start_step

M, N, TARGET = 8, 8, "h100"
LAYERS, WIDTH, HIDDEN, TOKENS = 8, 1024, 4096, 512
SHOWN = ("all-reduce", "reduce-scatter", "all-gather")
# The parts of the whole array that a device sends.
RING = dict.fromkeys((*SHOWN, "all-to-all"), (M - 1) / M) | {
    "all-reduce": 2 * (M - 1) / M,
    "collective-permute": 1.0,
}
TILES = "jaxmem.tile"  # in the names of the loops of regions


@dataclass(frozen=True)
class Collective:
    """One in a compiled step.

    Attributes:
      opcode: without the "-start" of an asynchronous one.
      operands: how many arrays are in it: XLA combines collectives.
      bytes: of its operands on one device, one time.
      times: how often a step runs it.
      in_loop: whether it is in a while loop.
      in_tiles: whether it is in the loop of a region (`jaxmem.scheduling`).
    """

    opcode: str
    operands: int
    bytes: int
    times: int
    in_loop: bool
    in_tiles: bool

    @property
    def sent(self) -> float:
        """Bytes that a device sends in a step."""
        whole = self.bytes * (M if self.opcode == "all-gather" else 1)
        return self.times * whole * RING[self.opcode]


def count(hlo_text: str) -> list[Collective]:
    """The collectives of a compiled module's text."""
    hlo = parse_hlo(hlo_text)
    found = []
    for made in map(hlo.instruction, list(hlo.lines)):
        opcode = made.opcode.removesuffix("-start") if made else ""
        if made is None or opcode not in RING:
            continue
        loops = list(_loops(hlo, made))
        trips = [_trips(loop) for loop in loops]
        sizes = [_bytes_of(hlo, operand) for operand in made.operands]
        where = bool(trips), any(TILES in loop.attributes for loop in loops)
        one = Collective(opcode, len(sizes), sum(sizes), math.prod(trips), *where)
        found.append(one)
    return found


def _loops(hlo: Hlo, made: Instruction) -> Iterator[Instruction]:
    """The while loops around an instruction."""
    caller = hlo.instruction(hlo.callers.get(made.computation, ""))
    while caller is not None:
        if caller.opcode == "while":
            yield caller
        caller = hlo.instruction(hlo.callers.get(caller.computation, ""))


def _trips(loop: Instruction) -> int:
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if not known:
        raise ValueError(f"the loop {loop.name} does not say how often it runs")
    return int(known.group(1))


def _bytes_of(hlo: Hlo, name: str) -> int:
    name, *index = name.split("#")  # newer XLA writes x#2 for an element of a tuple
    made = hlo.instruction(name)
    arrays = re.findall(r"(\w+)\[([\d,]*)\]", made.shape if made else "")
    dtype, sizes = arrays[int(index[0])] if index else arrays[0]
    bits = int(re.sub(r"\D", "", dtype) or 8)
    return math.prod(int(n) for n in sizes.split(",") if n) * bits // 8


def loss(params, batch, rng=None):
    """Mean square of what the layers make of `batch`, [examples, TOKENS, WIDTH]."""
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


def steps():
    """(what, where, transformation, step, how the parameters are sharded)."""
    adam, own = optax.adam(1e-3), adama(1e-3, axis_name="data")
    once, each = (functools.partial(summed, adam, every) for every in (False, True))
    yield "accumulation, one reduction", "shard_map", adam, _mapped(once), P()
    yield "accumulation, one a micro-batch", "shard_map", adam, _mapped(each), P()
    yield "AdamA", "shard_map", own, _mapped(functools.partial(folded, own)), P()
    # whose parameters are those it takes gradients of: no types that tell them apart
    step = _mapped(_microbatched(own), check_vma=False)
    yield "AdamA, microbatch", "shard_map", own, step, P()
    for where, spec in (("jit, data parallel", P()), ("jit, FSDP", P(None, "data"))):
        for what, tx in (("accumulation", adam), ("AdamA", adama(1e-3))):
            yield f"{what}, microbatch", where, tx, _microbatched(tx), spec
    where = "jit, data parallel, mesh="
    for what, tx in (("accumulation", adam), ("AdamA", own)):
        step = _microbatched(tx, axis_name="data", mesh=mesh())
        yield f"{what}, microbatch", where, tx, step, P()


def _microbatched(tx, **how):
    step = jaxmem.microbatch(loss, tx, N, **how)
    return lambda params, state, batch: step(params, state, batch, None)[:2]


def _mapped(step, check_vma=True):
    specs = P(), P(), P("data")
    return jax.shard_map(
        step, mesh=mesh(), in_specs=specs, out_specs=P(), check_vma=check_vma
    )


def mesh():
    return jaxmem.target_mesh(TARGET, (M,), ("data",))


def arguments(tx, spec):
    """Shapes and shardings of the parameters, the state and a batch of M N examples."""

    def struct(shape, spec, dtype=jnp.float32):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh(), spec))

    shapes = ((LAYERS, WIDTH, HIDDEN), (LAYERS, HIDDEN, WIDTH))
    params = tuple(struct(shape, spec) for shape in shapes)
    state = jax.tree.map(
        lambda x: struct(x.shape, spec if x.ndim else P(), x.dtype),
        jax.eval_shape(tx.init, params),
    )
    return params, state, struct((M * N, TOKENS, WIDTH), P("data"))


def compiled(fn, *args, donate: Sequence[int] = (0, 1)):
    """(text, temporary bytes) of the step with parameters and state donated."""
    with pure_call(fn, args, {}, donate=donate) as call:
        flat = flatten_call(fn, call)
        jitted = flat_function(lambda: fn, flat)
        traced = trace(jitted, flat)
        program = compile_program(jitted, traced, flat, get_target(TARGET), 600.0)
    return program.hlo, program.temp_bytes


def row(what, where, tx, step, spec):
    text, temp = compiled(step, *arguments(tx, spec))
    found = [c for c in count(text) if c.bytes > 4]  # not the loss
    runs = lambda opcode: sum(c.times for c in found if c.opcode == opcode)
    inside = sum(c.times for c in found if c.in_loop)
    counts = [runs(opcode) for opcode in SHOWN]
    return what, where, *counts, inside, sum(c.sent for c in found) / MIB, temp / MIB


def main() -> None:
    head = ("step", "under", *SHOWN, "of these in loops", "MiB sent", "temp MiB")
    publish("collectives", head, [row(*step) for step in steps()])


if __name__ == "__main__":
    main()
