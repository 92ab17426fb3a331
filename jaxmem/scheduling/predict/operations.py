"""The graph of a jaxpr: what is run, and what exists in memory.

Calls are written out, and equations that XLA fuses are one operation (`fusion.py`). A
loop is one operation, in which one iteration takes what it takes at its own peak. Not
modelled: padding and fragmentation, copies that XLA inserts, workspace of libraries.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxmem import _compat
from jaxmem._checks import (
    check_bool,
    check_callable,
    check_int,
    wrong_type,
    wrong_value,
)
from jaxmem.cost.equations import flops
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph
from jaxmem.ir.propagation import shardings_in
from jaxmem.ir.ragged import copied_rows, groups, is_ragged
from jaxmem.ir.scans import split
from jaxmem.ir.shard_maps import aliases_inside, inside_of, whole_step
from jaxmem.ir.shards import InputShardings, Shardings
from jaxmem.planning import Graph, Operation, Value, peak, xla_order
from jaxmem.scheduling.predict.fusion import Fusion, Kind
from jaxmem.scheduling.predict.fusion_zeros import GRADIENT, early_zeros
from jaxmem.scheduling.predict.iterations import iteration_atoms, iteration_of
from jaxmem.scheduling.predict.kernels import Kernel, Kernels
from jaxmem.scheduling.predict.products import merged
from jaxmem.scheduling.predict.tpu import in_tiles
from jaxmem.scheduling.predict.written_out import written_out

PeakOf = Callable[[Graph], int]


@dataclass(frozen=True)
class Operations:
    """A jaxpr as a graph, and what each part of it stands for.

    Attributes:
      graph: the operations and the arrays that exist in memory, in program order.
      closed: the jaxpr with its calls written out; the positions below are in it.
      equations: operation -> the equations it does; what several recompute in
        themselves is named by each of them.
      variables: value -> its variable; None for what only orders operations.
      values: variable -> the value whose bytes it shows, where it exists in memory.
      shardings: how the variables are sharded over devices.
    """

    graph: Graph
    closed: Any
    equations: tuple[tuple[int, ...], ...]
    variables: tuple[Any, ...]
    values: Mapping[Any, int]
    shardings: Shardings = field(default_factory=Shardings, repr=False)


def compiled_peak(graph: Graph) -> int:
    """The peak of a graph in the order that XLA would choose, in bytes."""
    return peak(graph, xla_order(graph))


def as_compiled(ops: Operations, tpu: bool = False) -> Graph:
    """The graph where no order is asked for: XLA:GPU then merges products."""
    if tpu:
        return ops.graph
    equations = [[ops.closed.eqns[i] for i in places] for places in ops.equations]
    return merged(ops.graph, equations, ops.values, ops.shardings.bytes_of)


def operations_of(
    closed,
    aliases: Mapping[int, int] | None = None,
    peak_of: PeakOf = compiled_peak,
    tpu: bool = False,
    duplicates: bool | None = None,
    shardings: InputShardings | None = None,
) -> Operations:
    """The graph of a closed jaxpr; of one device's part where all is one `shard_map`.

    Args:
      closed: a closed jaxpr, as `jax.make_jaxpr` gives it.
      aliases: position of an output -> of the donated input in whose memory it lies.
      peak_of: the bytes that the inside of a loop takes, given its graph: by default in
        the order of XLA.
      tpu: whether XLA compiles it for a TPU (`tpu.py`); else it is for a GPU.
      duplicates: whether what is computed twice of the same arrays stays so; by default
        for a TPU, whose products compute in themselves what they read.
      shardings: how the inputs are sharded over devices: bytes and flops are then those
        of one device.

    Raises:
      TypeError: no closed jaxpr, or another argument not of its kind.
      ValueError: `aliases` of positions that are not there.

    Returns:
      `Operations`. Constants and inputs are the graph's arguments.

    Example::

      closed = jax.make_jaxpr(step)(state, batch)
      graph = jaxmem.scheduling.operations_of(closed).graph
      print(jaxmem.planning.order(graph))
    """
    if not isinstance(closed, _compat.ClosedJaxpr):
        raise wrong_type("closed", closed, "a closed jaxpr, of jax.make_jaxpr")
    check_callable("peak_of", peak_of, "a function of a graph")
    check_bool("tpu", tpu)
    if duplicates is not None:
        check_bool("duplicates", duplicates)
    if aliases is not None:
        _check_aliases(aliases, closed)
    flat = written_out(closed, tpu if duplicates is None else duplicates)
    if (eqn := whole_step(flat)) is not None:
        # no `shardings`: the shapes inside are those of one device already
        pairs = aliases_inside(flat, eqn, aliases or {})
        given = (pairs, peak_of, tpu, duplicates)
        return inside_of(eqn, lambda body: operations_of(body, *given))
    fusion = Fusion(JaxprGraph(flat), tpu)
    build = _Build(fusion, peak_of, shardings_in(flat, shardings))
    arguments = [build.number(v) for v in fusion.graph.invars]
    for kernel in build.kernels:
        build.add(kernel)
    outs = [fusion.resolve(v) for v in fusion.graph.outvars]
    # an output may stand twice, or be an input as it is: neither takes memory
    results = dict.fromkeys(build.numbers[v] for v in outs if v is not None)
    graph = Graph(
        tuple(build.operations),
        tuple(build.values),
        tuple(arguments),
        tuple(v for v in results if v not in set(arguments)),
        _donated(build, outs, fusion.graph.arguments, aliases or {}),
    )
    if tpu:
        graph = in_tiles(graph, build.variables, fusion.images)
    shown = {v: build.numbers.get(u) for v, u in fusion.source.items()}
    return Operations(
        _passed_on(graph),
        flat,
        tuple(build.equations),
        tuple(build.variables),
        build.numbers | {v: n for v, n in shown.items() if n is not None},
        build.shardings,
    )


def _check_aliases(aliases: Any, closed) -> None:
    allowed = "a mapping from positions of outputs to positions of inputs, or None"
    if not isinstance(aliases, Mapping):
        raise wrong_type("aliases", aliases, allowed)
    counts = len(closed.out_avals), len(closed.in_avals)
    for pair in aliases.items():
        for place, count in zip(pair, counts, strict=True):
            if not 0 <= check_int("aliases", place) < count:
                raise wrong_value("aliases", aliases, f"{allowed}; there are {counts}")


def _donated(build, outs, ins, aliases: Mapping[int, int]) -> dict[int, int]:
    """Output -> donated argument; an output that is several takes the first."""
    found: dict[int, int] = {}
    numbers = build.numbers
    arguments = {numbers[v] for v in ins}
    for o, i in aliases.items():
        out = None if outs[o] is None else numbers[outs[o]]
        if out is None or out in arguments:
            continue
        if build.is_one_size(out, numbers[ins[i]]):
            found.setdefault(out, numbers[ins[i]])
    return found


def _passed_on(graph: Graph) -> Graph:
    """The graph, where what lies in a donated argument takes nothing."""
    # That is what loops and updates of slices, each the last reader, write over the
    # argument, one after another, for the operation that makes the output there.
    values = list(graph.values)
    for out, argument in graph.aliases.items():
        for v in _written_over(graph, argument, out):
            values[v] = replace(values[v], bytes=0)
    return replace(graph, values=tuple(values))


def _written_over(graph: Graph, argument: int, out: int) -> list[int]:
    """What lies in an argument before the output does."""
    found, v, updates = [], argument, False
    while len(graph.readers[v]) == 1:
        (i,) = graph.readers[v]
        over = {old: new for new, old in graph.operations[i].in_place}
        if i == graph.maker.get(out):
            # of a slice: behind it something else may want an array of its own
            return found if not updates or over.get(v) == out else []
        known = primitives.named(graph.operations[i].name)
        is_loop = known.kind is primitives.Kind.LOOP
        if (
            v not in over
            or over[v] in graph.aliases
            or not (is_loop or known.into_first)
        ):
            return []
        updates = updates or not is_loop
        v = over[v]
        found.append(v)
    return []


class _Build:
    def __init__(self, fusion: Fusion, peak_of: PeakOf, shardings: Shardings):
        self.fusion, self.peak_of, self.shardings = fusion, peak_of, shardings
        self.kernels = Kernels(fusion)
        self.operations: list[Operation] = []
        self.equations: list[tuple[int, ...]] = []
        self.values: list[Value] = []
        self.variables: list[Any] = []
        self.numbers: dict[Any, int] = {}
        self.after: dict[Any, int] = {}  # output of a barrier -> the barrier's token
        self.pools = {} if fusion.tpu else early_zeros(fusion.graph)
        self.zeros: dict[Any, int] = {}  # what is pooled -> zeros for its gradient
        self.effect: list[int] = []  # the token of the last operation with side effects

    def number(self, v) -> int:
        if v not in self.numbers:
            self.numbers[v] = self.value(
                self.shardings.bytes_of(v), v.aval.str_short(), v
            )
        return self.numbers[v]

    def value(self, size: int, name: str, variable=None) -> int:
        self.values.append(Value(size, name))
        self.variables.append(variable)
        return len(self.values) - 1

    def is_one_size(self, v: int, u: int) -> bool:
        """Whether two arrays of one size are sharded over as many devices."""
        return self.values[v].bytes == self.values[u].bytes

    def add(self, kernel: Kernel) -> None:
        fusion, end = self.fusion, kernel.equations[-1]
        eqns = [fusion.graph.eqns[i] for i in kernel.equations]
        last, tied = eqns[-1], fusion.kinds[end] is Kind.TIE
        repeatable = not _compat.has_side_effects(last)
        reads = [self.number(v) for v in kernel.reads]
        # what has side effects waits for the one before, so that their order stays
        reads += self.tokens(kernel) + ([] if repeatable else self.effect)
        writes = [] if tied else [self.number(v) for v in kernel.writes]
        over = (*kernel.over, *_carried(fusion, last))
        if tied:
            # a token of no bytes, for which whoever reads the barrier's outputs waits
            writes = [self.value(0, "barrier")]
            self.after.update(dict.fromkeys(last.outvars, writes[0]))
        if not repeatable:
            self.effect = [self.value(0, "effect")]
            writes += self.effect
        over = [(self.numbers[v], self.numbers[u]) for v, u in over]
        # sharded over other devices it does not fit into the other's place
        over = [pair for pair in over if self.is_one_size(*pair)]
        if end in self.pools:
            self.pool(self.pools[end], reads, writes, over)
        moved = 0 if tied else sum(self.values[v].bytes for v in reads + writes)
        self.operations.append(
            Operation(
                self.kernels.name(kernel),
                tuple(dict.fromkeys(reads)),
                tuple(writes),
                max(self.inside(eqn) for eqn in eqns),
                tuple(over),
                sum(flops(eqn, self.shardings) for eqn in eqns),
                float(moved),
                _compat.name_stack(last),
                repeatable,
            )
        )
        self.equations.append(kernel.equations)

    def inside(self, eqn) -> int:
        own = inside(eqn, self.peak_of, self.fusion.tpu, self.shardings)
        return own + self.shardings.partial_bytes(eqn)

    def pool(self, pooled, reads: list[int], writes: list[int], over: list) -> None:
        """A pool makes zeros besides; its gradient writes over them."""
        if pooled in self.zeros:
            reads.append(self.zeros[pooled])
            over.append((writes[0], self.zeros[pooled]))
        else:
            self.zeros[pooled] = self.value(self.shardings.bytes_of(pooled), "zeros")
            writes.append(self.zeros[pooled])

    def tokens(self, kernel: Kernel) -> list[int]:
        found = (v for i in kernel.equations for v in self.fusion.barriers(i))
        return list(dict.fromkeys(self.after[v] for v in found))


def _carried(fusion: Fusion, eqn) -> Iterator[tuple[Any, Any]]:
    """(last, first) state of a loop, which lie in one place."""
    if primitives.is_scan(eqn):
        first = split(eqn, eqn.invars)[1]
    elif primitives.is_while(eqn):
        first = eqn.invars[eqn.params["cond_nconsts"] + eqn.params["body_nconsts"] :]
    else:
        return
    # an array that is the first state twice can be written over once
    taken = set()
    for last, v in zip(eqn.outvars, map(fusion.resolve, first), strict=False):
        if v is not None and v not in taken:
            taken.add(v)
            yield last, v


_INDEX = 4  # bytes


def inside(eqn, peak_of: PeakOf, tpu: bool, shardings: Shardings) -> int:
    """Bytes that a loop or a branch holds beside what it reads and makes."""
    bodies = jaxprs.bodies(eqn)

    def graph_of(body, aliases, atoms=()) -> Graph:
        given = shardings.inputs(atoms) if atoms else None
        ops = operations_of(body, aliases, peak_of, tpu, shardings=given)
        return as_compiled(ops, tpu)

    if primitives.is_scan(eqn):
        return peak_of(graph_of(*iteration_of(eqn), iteration_atoms(eqn)))
    if primitives.is_while(eqn):
        body, atoms = eqn.params["body_jaxpr"], eqn.invars[eqn.params["cond_nconsts"] :]
        first = eqn.params["body_nconsts"]
        aliases = {k: first + k for k in range(len(eqn.outvars))}
        return peak_of(graph_of(body, aliases, atoms))
    if eqn.primitive.name == GRADIENT:  # where each maximum is, along each axis
        source = eqn.invars[0].aval
        return _INDEX * source.ndim * source.size // shardings.shards(eqn.invars[0])
    # XLA:GPU has no such product, and copies rows for each group (`ir/ragged.py`)
    if is_ragged(eqn) and not tpu:
        copies = (shardings.bytes_of(eqn.invars[k]) for k in copied_rows(eqn))
        return groups(eqn) * sum(copies)
    if primitives.is_shard_map(eqn):
        graph = inside_of(eqn, lambda body: graph_of(body, {}))
        # its outputs are counted as those of the equation
        return peak_of(graph) - graph.bytes_of(graph.outputs)
    if not (primitives.is_branch(eqn) or primitives.is_jit(eqn)):
        return 0
    # a branch has no operand that says which one is taken
    atoms = eqn.invars[1:] if primitives.is_branch(eqn) else eqn.invars
    graphs = [graph_of(_closed(body), {}, atoms) for body in bodies]
    # one of them is run, and nobody knows which
    return max(peak_of(g) - g.bytes_of(g.outputs) for g in graphs)


def _closed(body):
    return body if hasattr(body, "consts") else _compat.ClosedJaxpr(body, ())
