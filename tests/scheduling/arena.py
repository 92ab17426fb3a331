"""Runs a plan on CPU inside one flat block of bytes, which proves order and layout.

Every array that the plan says exists is a view of the arena at its offset. What is
freed is overwritten at once, and so is the room that a loop has for its inside: a value
read after its end, or one laid over another that is still needed, comes out wrong.
Inputs lie where the caller has them; a donated one is written over by its new value as
soon as nobody reads it any more.

Equations are evaluated one at a time by JAX, loops as a whole.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem._checks import check_callable, wrong_type, wrong_value
from jaxmem.ir.graph import JaxprGraph, Values
from jaxmem.ir.scans import is_var
from jaxmem.planning import Graph, layout, lifetimes
from jaxmem.scheduling.order.given import check_operations
from jaxmem.scheduling.predict.operations import Operations

_POISON = 0xA5
Layouter = Callable[[Sequence[Any]], Any]


@dataclass(frozen=True)
class Places:
    """Where in the arena things lie.

    Attributes:
      size: bytes of the arena.
      values: value -> offset in bytes, of all that are in the arena at some time.
      scratch: operation -> offset of what it holds while it runs, where that is any.
    """

    size: int
    values: Mapping[int, int]
    scratch: Mapping[int, int]


def places_of(graph: Graph, order: Sequence[int], layout: Layouter = layout) -> Places:
    """Where everything lies when the operations are done in an order.

    Args:
      graph: the graph.
      order: every operation once, inputs first.
      layout: gives buffers their offsets, `jaxmem.planning.layout` or its like.

    Returns:
      Offsets that are multiples of 16.
    """
    if order is None:
        raise wrong_type("order", order, "a sequence of numbers of operations")
    check_callable("layout", layout, "a function of buffers")
    held = lifetimes(graph, order, alignment=16)
    found = layout(held.buffers)
    return Places(
        found.height,
        {v: found.offsets[k] for v, k in held.values.items()},
        {i: found.offsets[k] for i, k in held.scratch.items()},
    )


def run_in_arena(
    ops: Operations, args: Sequence[Any], order: Sequence[int], places: Places
) -> list[Any]:
    """The results of a jaxpr, computed in an arena.

    Args:
      ops: what `operations_of` gave.
      args: an array for each input of `ops.closed`; they are copied, not changed.
      order: every operation once, inputs first.
      places: the layout.

    Returns:
      The outputs of the jaxpr.

    Raises:
      ValueError: `order` is none, or something that is to lie in the arena has no
        offset, or one outside of it.
    """
    order = check_operations(ops).graph.check_order(order)
    _check_args(args, ops.closed.in_avals)
    if not isinstance(places, Places):
        raise wrong_type("places", places, "Places, of places_of(...)")
    arena = _Arena(ops, args, places)
    for i in order:
        arena.do(i)
    return arena.results()


def _check_args(args: Any, wanted: Sequence[Any]) -> None:
    allowed = f"{len(wanted)} arrays, as {', '.join(a.str_short() for a in wanted)}"
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise wrong_type("args", args, allowed)
    if [getattr(x, "shape", None) for x in args] != [a.shape for a in wanted]:
        raise wrong_value("args", args, allowed)


class _Arena:
    """The block, and where each value lies at the moment."""

    def __init__(self, ops: Operations, args: Sequence[Any], places: Places):
        self.ops, self.graph, self.places = ops, ops.graph, places
        self.equations = JaxprGraph(ops.closed)
        self.numbers = {v: n for n, v in enumerate(ops.variables) if v is not None}
        outs = (ops.values.get(v) for v in self.equations.outputs)
        self.stay = {v for v in outs if v is not None}
        self.block = np.full(places.size, _POISON, np.uint8)
        self.left = [len(r) for r in ops.graph.readers]
        self.keys: dict[int, Any] = {}  # values that are random keys -> their kind
        self.bytes: dict[int, np.ndarray] = {}  # value -> where it lies
        for v, x in self.equations.inputs(args).items():
            self.bytes[self.numbers[v]] = self.plain(self.numbers[v], x).copy()
        self.new = {a: v for v, a in ops.graph.aliases.items()}

    def do(self, i: int) -> None:
        """Does an operation: reads, computes, lets go of what is dead, writes."""
        operation = self.graph.operations[i]
        if operation.scratch:
            room = self.room(self.places.scratch, i, operation.scratch)
            room[:] = _POISON
        made = self.compute(i)
        inputs = dict.fromkeys(v for v in operation.inputs if v in self.bytes)
        for v in inputs:
            self.left[v] -= 1
        dead = [v for v in inputs if not self.left[v] and v not in self.stay]
        for v in dead:
            self.bytes[v][:] = _POISON
        for v, x in made.items():
            self.write(v, x)
        for v in dead:
            self.move_back(v)
        for v in made:
            if not self.graph.readers[v] and v not in self.stay:
                self.bytes.pop(v)[:] = _POISON

    def compute(self, i: int) -> dict[int, np.ndarray]:
        """The bytes that an operation makes, of what lies in memory."""
        operation = self.graph.operations[i]
        wanted = [v for v in operation.outputs if self.ops.variables[v] is not None]
        values = self.values(operation.inputs, self.ops.equations[i])
        return {v: self.plain(v, values.read(self.ops.variables[v])) for v in wanted}

    def values(self, there: Iterable[int], equations: Sequence[int] = ()) -> "_Inside":
        """What can be read when these values lie in memory."""
        variables = ((v, self.ops.variables[v]) for v in there)
        env = {w: self.read(v) for v, w in variables if w is not None}
        made = {w for k in equations for w in self.equations.eqns[k].outvars}
        return _Inside(self.equations, env, exist=self.numbers.keys(), made=made)

    def write(self, v: int, x: np.ndarray) -> None:
        """Puts a value in the place of a dead donated argument, else in the arena."""
        argument = self.graph.aliases.get(v)
        if argument is not None and not self.left[argument]:
            self.bytes[v] = self.bytes[argument]
        else:
            self.bytes[v] = self.room(self.places.values, v, x.size)
        self.bytes[v][:] = x

    def move_back(self, argument: int) -> None:
        """A new value that waited in the arena goes where the argument lay."""
        v = self.new.get(argument)
        if v in self.bytes and self.bytes[v] is not self.bytes[argument]:
            self.bytes[argument][:] = self.bytes[v]
            self.bytes[v][:] = _POISON
            self.bytes[v] = self.bytes[argument]

    def room(self, offsets: Mapping[int, int], number: int, size: int) -> np.ndarray:
        """A piece of the arena."""
        start = offsets.get(number, -1 if size else 0)
        if start < 0 or start + size > self.block.size:
            raise ValueError(
                f"places: {size} bytes of number {number} lie at {start}, outside of "
                f"an arena of {self.block.size}"
            )
        return self.block[start : start + size]

    def plain(self, v: int, x) -> np.ndarray:
        """The bytes of an array; a random key is its words."""
        if jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key):
            self.keys[v] = jax.random.key_impl(x)
            x = jax.random.key_data(x)
        return np.frombuffer(np.asarray(x).tobytes(), np.uint8)

    def read(self, v: int):
        """A value as an array of its own, which stays when the place is used again."""
        shape, held = self.ops.variables[v].aval.shape, self.bytes[v]
        if v in self.keys:
            words = jnp.array(held.view(np.uint32).reshape(*shape, -1), copy=True)
            return jax.random.wrap_key_data(words, impl=self.keys[v])
        raw = held.view(self.ops.variables[v].aval.dtype).reshape(shape)
        return jnp.array(raw, copy=True)

    def results(self) -> list[Any]:
        """The outputs, of what lies in memory at the end."""
        values = self.values(self.stay)
        return [values.read(v) for v in self.equations.outvars]


@dataclass
class _Inside(Values):
    """The values of variables in an operation, made of nothing but its inputs.

    Attributes:
      exist: variables that exist in memory: they are read there, not made.
      made: those of them that the operation makes.
    """

    exist: Set[Any] = frozenset()
    made: Set[Any] = frozenset()

    def read(self, atom):
        """The value of a variable or literal; a barrier is looked through."""
        atom = self._before_barriers(atom)
        foreign = is_var(atom) and atom in self.exist and atom not in self.made
        if foreign and atom not in self.env:
            raise RuntimeError(f"{atom} is read by an operation that does not name it")
        return super().read(atom)

    def _missing(self, i):
        """The equations to do before this one, none of them a barrier."""
        if i in self.done:
            return []
        atoms = map(self._before_barriers, self.graph.eqns[i].invars)
        makers = [self.graph.maker[v] for v in atoms if is_var(v) and v not in self.env]
        return [k for k in dict.fromkeys(makers) if k not in self.done]

    def _before_barriers(self, atom):
        while is_var(atom) and atom in self.graph.maker:
            eqn = self.graph.eqns[self.graph.maker[atom]]
            if eqn.primitive.name != "optimization_barrier":
                break
            atom = eqn.invars[eqn.outvars.index(atom)]
        return atom
