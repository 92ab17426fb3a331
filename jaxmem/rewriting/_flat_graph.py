"""A jaxpr as a graph for matching: calls inlined, values with their users.

Formulas cross the bodies of `jit` and `custom_jvp_call`: the `where` in a mask is a
call. `Frame` remembers where a call was, so that it can be put back.
"""

from collections.abc import Container, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxmem import _compat
from jaxmem.ir import jaxprs as _jaxpr
from jaxmem.ir import primitives
from jaxmem.ir.operands_first import operands_first
from jaxmem.ir.primitives import Kind


class FlatValue:
    """One array in the graph: who makes it, who uses it, and its value if known."""

    __slots__ = ("aval", "node", "known", "users", "folded", "bottom", "within")

    def __init__(self, aval, node=None, known=None):
        self.aval, self.node, self.known = aval, node, known
        self.users: list[Node] = []
        self.folded: Any = ()
        self.bottom: FlatValue | None = None  # below casts and views, once known
        # What products and sums lead to, and after how many; once known.
        self.within: dict[str, int] | None = None

    @property
    def is_known(self) -> bool:
        """Whether this is a constant of the graph."""
        return self.known is not None

    @property
    def shape(self) -> tuple[int, ...]:
        return getattr(self.aval, "shape", ())

    @property
    def dtype(self) -> Any:
        return getattr(self.aval, "dtype", None)


@dataclass(eq=False)
class Node:
    """One equation, with graphs for its bodies."""

    eqn: Any
    ins: list[FlatValue]
    frame: "Frame"
    outs: list[FlatValue] = field(default_factory=list)
    bodies: "list[FlatGraph]" = field(default_factory=list)

    @property
    def name(self) -> str:
        return self.eqn.primitive.name

    @property
    def record(self) -> primitives.Record:
        """What is known of its primitive."""
        return primitives.of(self.eqn)

    @property
    def params(self) -> dict[str, Any]:
        return self.eqn.params

    @property
    def rule(self) -> str | None:
        """The function with its own derivative that this is part of, if any."""
        for frame in reversed(self.frame.path()):
            if frame.has_own_rule:
                body, _ = _jaxpr.split(_jaxpr.bodies(frame.eqn)[0])
                return _compat.function_source(body)
        return None


@dataclass(eq=False)
class Frame:
    """A call that was inlined: what it ran, and between which values."""

    eqn: Any
    parent: "Frame | None"
    ins: list[FlatValue]
    items: "list[Node | Frame]" = field(default_factory=list)
    outs: list[FlatValue] = field(default_factory=list)

    @property
    def has_own_rule(self) -> bool:
        return self.eqn is not None and primitives.of(self.eqn).kind is Kind.CUSTOM_JVP

    def path(self) -> "list[Frame]":
        """From the outermost frame to this one."""
        return [*(self.parent.path() if self.parent else []), self]

    def nodes(self) -> Iterator[Node]:
        for item in self.items:
            if isinstance(item, Frame):
                yield from item.nodes()
            else:
                yield item


@dataclass(eq=False)
class FlatGraph:
    """A body: its outermost frame."""

    body: Any
    top: Frame

    @property
    def nodes(self) -> list[Node]:
        return list(self.top.nodes())


def build(body) -> FlatGraph:
    """The graph of a jaxpr, its users filled in for everything that is alive."""
    jaxpr, consts = _jaxpr.split(body)
    ins = [FlatValue(v.aval) for v in jaxpr.invars]
    top = Frame(None, None, ins)
    _fill(top, jaxpr, consts)
    _note_users(top)
    return FlatGraph(body, top)


def _fill(frame: Frame, jaxpr, consts: Sequence[Any]) -> None:
    env = dict(zip(jaxpr.invars, frame.ins, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = FlatValue(var.aval, known=const)

    def read(atom):
        if isinstance(atom, _compat.Literal):
            return FlatValue(atom.aval, known=atom.val)
        return env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        if _jaxpr.keeps_sharding(eqn):
            env[eqn.outvars[0]] = ins[0]
            continue
        item = _item(eqn, ins, frame)
        frame.items.append(item)
        env.update(zip(eqn.outvars, item.outs, strict=True))
    frame.outs = [read(v) for v in jaxpr.outvars]


_OPENED = (Kind.JIT, Kind.CALL, Kind.CUSTOM_JVP)


def _item(eqn, ins: list[FlatValue], frame: Frame) -> Node | Frame:
    inner = _jaxpr.bodies(eqn)
    kind = primitives.of(eqn).kind
    if kind in _OPENED and len(inner) == 1 and not eqn.effects:
        call = Frame(eqn, frame, ins)
        _fill(call, *_jaxpr.split(inner[0]))
        return call
    node = Node(eqn, ins, frame)
    node.outs = [FlatValue(v.aval, node) for v in eqn.outvars]
    # differentiated by a rule of its own: what is inside is not ours to change
    if kind is not Kind.CUSTOM_VJP:
        node.bodies = [build(body) for body in inner]
    return node


def _note_users(top: Frame) -> None:
    # Fills `users`, of live nodes only: dead code holds nothing back.
    alive = set(top.outs)
    for node in reversed(list(top.nodes())):
        if node.eqn.effects or alive.intersection(node.outs):
            alive.update(node.ins)
            for value in node.ins:
                value.users.append(node)


def made_of(node: Node, within: Container[Node]) -> list[Node]:
    """The nodes among `within` that a node is made of, itself the last."""
    found: dict[Node, None] = {}

    def missing(node: Node) -> list[Node]:
        before = (value.node for value in node.ins)
        inside = (n for n in before if n is not None and n in within)
        return [n for n in inside if n not in found]

    for one in operands_first(node, missing):
        found[one] = None
    return list(found)


def inputs_of(nodes: Sequence[Node]) -> list[FlatValue]:
    """What a list of nodes reads and does not make, numbers known apart."""
    made = {v for node in nodes for v in node.outs}
    read = dict.fromkeys(v for node in nodes for v in node.ins)
    return [v for v in read if v not in made and not v.is_known]
