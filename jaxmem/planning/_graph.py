"""A computation as plain data: operations, the values they read and make, and bytes."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from jaxmem._checks import check_int, check_numbers, shown, wrong_type


def _all_are(kind: type, items: object) -> bool:
    return isinstance(items, tuple | list) and all(isinstance(x, kind) for x in items)


@dataclass(frozen=True)
class Value:
    """An array that exists in memory.

    Attributes:
      bytes: its size.
      name: shown to users: its shape and dtype, where they are known.
    """

    bytes: int
    name: str = ""

    def __post_init__(self):
        # Graphs have many values, so the full check runs only where it can fail.
        if type(self.bytes) is not int or self.bytes < 0:
            object.__setattr__(self, "bytes", check_int("bytes", self.bytes, 0))


@dataclass(frozen=True)
class Operation:
    """One operation, or several that the compiler fuses into one kernel.

    Attributes:
      name: what it computes.
      inputs: the values it reads, by their numbers.
      outputs: the values it makes.
      scratch: bytes that it holds only while it runs, beside its inputs and outputs
        (for example the body of a loop).
      in_place: (output, input) pairs: the output may overwrite the input if nothing
        reads the input later. An output with several pairs overwrites one input.
      flops: floating-point operations.
      moved: bytes read and written.
      path: the module or name scope it belongs to.
      recomputable: whether it may run a second time (false for side effects).
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    scratch: int = 0
    in_place: tuple[tuple[int, int], ...] = ()
    flops: float = 0.0
    moved: float = 0.0
    path: str = ""
    recomputable: bool = True


@dataclass(frozen=True)
class Graph:
    """Operations in a valid order, and the values that they read and make.

    Attributes:
      operations: in program order: every value is made before it is read.
      values: by number.
      arguments: the values that exist before the first operation. The caller holds
        their bytes throughout, so a peak does not count them.
      outputs: the values that exist at the end.
      aliases: output -> argument whose buffer it takes over (donation). The output
        needs bytes of its own only while an operation has yet to read the argument.

    Raises:
      ValueError: a value is read before it is made, or made twice; an output is never
        made; `aliases` or `in_place` names a value that does not exist.

    Example::

      from jaxmem.planning import Graph, Operation, Value

      double = Operation("double", inputs=(0,), outputs=(1,), flops=4)
      add = Operation("add", inputs=(0, 1), outputs=(2,), flops=4)
      graph = Graph((double, add), (Value(16),) * 3, arguments=(0,), outputs=(2,))
    """

    operations: tuple[Operation, ...]
    values: tuple[Value, ...]
    arguments: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    aliases: Mapping[int, int] = field(default_factory=dict)

    def __post_init__(self):
        self._check_kinds()
        known = self._check_operations()
        if beyond := known.difference(range(len(self.values))):
            raise ValueError(
                f"values={shown(self.values)}: there is none of number "
                f"{min(beyond, key=str)!r}, which is an argument or made"
            )
        missing = [v for v in self.outputs if v not in known]
        if missing:
            raise ValueError(f"outputs: value {missing[0]!r} is never made")
        self._check_aliases()

    def _check_operations(self) -> set[int]:
        """All values; ValueError unless each is made once, before it is read."""
        known = set(self.arguments)
        for place, operation in enumerate(self.operations):
            missing = [v for v in operation.inputs if v not in known]
            if missing:
                raise ValueError(
                    f"operations[{place}] ({operation.name}) reads value {missing[0]} "
                    "before it is made"
                )
            remade = [v for v in operation.outputs if v in known]
            if remade:
                raise ValueError(
                    f"operations[{place}] ({operation.name}) makes value {remade[0]} "
                    "a second time"
                )
            for v, u in operation.in_place:
                if v not in operation.outputs or u not in operation.inputs:
                    raise ValueError(
                        f"operations[{place}] ({operation.name}) in_place: {(v, u)} is "
                        "not an (output, input) of it"
                    )
            known.update(operation.outputs)
        return known

    def _check_aliases(self) -> None:
        arguments, outputs, taken = set(self.arguments), set(self.outputs), set()
        for v, u in self.aliases.items():
            if v not in outputs or v in arguments:
                raise ValueError(f"aliases: value {v!r} is not an output that is made")
            if u not in arguments:
                raise ValueError(f"aliases: value {u!r} is not an argument")
            if u in taken:
                raise ValueError(f"aliases: two outputs in argument {u}")
            taken.add(u)

    def _check_kinds(self) -> None:
        """TypeError unless the fields hold operations, values and value numbers."""
        for name, kind in (("operations", Operation), ("values", Value)):
            items = getattr(self, name)
            if not _all_are(kind, items):
                raise wrong_type(name, items, f"a tuple of {kind.__name__}s")
        for name in ("arguments", "outputs"):
            items = getattr(self, name)
            if not _all_are(int, items):
                raise wrong_type(name, items, "a tuple of numbers of values")
        if not isinstance(self.aliases, Mapping):
            raise wrong_type("aliases", self.aliases, "a mapping of numbers of values")

    @cached_property
    def maker(self) -> dict[int, int]:
        """Value -> the operation that makes it; an argument has no entry."""
        return {v: i for i, o in enumerate(self.operations) for v in o.outputs}

    @cached_property
    def readers(self) -> list[tuple[int, ...]]:
        """Value -> the operations that read it, each once."""
        readers: list[list[int]] = [[] for _ in self.values]
        for i, operation in enumerate(self.operations):
            for v in dict.fromkeys(operation.inputs):
                readers[v].append(i)
        return [tuple(operations) for operations in readers]

    @cached_property
    def before(self) -> list[tuple[int, ...]]:
        """Operation -> the operations whose values it reads, each once."""
        maker = self.maker
        return [
            tuple(dict.fromkeys(maker[v] for v in o.inputs if v in maker))
            for o in self.operations
        ]

    @cached_property
    def after(self) -> list[tuple[int, ...]]:
        """Operation -> the operations that read its values, each once."""
        readers = self.readers
        return [
            tuple(dict.fromkeys(r for v in o.outputs for r in readers[v]))
            for o in self.operations
        ]

    def check_order(self, order: Sequence[int]) -> tuple[int, ...]:
        """Returns the order; ValueError unless it is a permutation, inputs first."""
        allowed = "must have every operation once"
        if isinstance(order, str | Mapping) or not isinstance(order, Iterable):
            raise wrong_type("order", order, f"a sequence of numbers, {allowed}")
        order = check_numbers("order", order)
        if sorted(order) != list(range(len(self.operations))):
            raise ValueError(f"order: {allowed}: {shown(order)}")
        done: set[int] = set()
        for i in order:
            early = [b for b in self.before[i] if b not in done]
            if early:
                raise ValueError(
                    f"order: operation {i} comes before {early[0]}: {shown(order)}"
                )
            done.add(i)
        return order

    def bytes_of(self, values: Iterable[int]) -> int:
        """Bytes of these values together."""
        return sum(self.values[v].bytes for v in values)


def checked(graph: Graph) -> Graph:
    """Returns the graph; TypeError for anything else."""
    if not isinstance(graph, Graph):
        raise wrong_type("graph", graph, "a jaxmem.planning.Graph")
    return graph
