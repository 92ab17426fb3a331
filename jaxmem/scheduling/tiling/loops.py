"""Scans, branches and calls on one part of the examples.

A body is understood equation by equation, until what goes into an iteration is what
comes out of it: then a scan works on a part as its body does.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxmem import _compat
from jaxmem.ir import jaxprs
from jaxmem.ir.axis_labels import narrowed
from jaxmem.ir.flatten import is_jit, why_closed
from jaxmem.ir.scans import is_var, scan_like, split
from jaxmem.scheduling.tiling.partial_sums import (
    SUM,
    NotInParts,
    State,
    Treatment,
    line_of,
    treated,
)

_CALLS = frozenset(
    """jit pjit closed_call core_call custom_jvp_call custom_vjp_call
    custom_vjp_call_jaxpr""".split()
)
_NESTED = _CALLS | {"scan", "cond", *jaxprs.TAKES_OPEN_JAXPR}
_ZEROS = frozenset({"broadcast_in_dim", "convert_element_type", "reshape", "transpose"})


def is_nested(eqn) -> bool:
    """Whether an equation is one whose bodies are understood here."""
    return eqn.primitive.name in _NESTED


def treatment(
    eqn, ins: Sequence[State], wanted: Sequence[int | None], n: int
) -> Treatment | None:
    """`partial_sums.treated`, of scans, branches and calls too."""
    is_whole = all(s is None for s in ins)
    if is_whole and all(w is None for w in wanted):
        return None
    if not is_nested(eqn):
        return treated(eqn, ins, wanted, n)
    try:
        if _compat.has_side_effects(eqn):
            raise NotInParts(eqn, "it has side effects")
        if eqn.primitive.name == "scan":
            return _scan(eqn, ins, wanted, n)
        if eqn.primitive.name == "cond":
            return _cond(eqn, ins, wanted, n)
        return _call(eqn, ins, wanted, n)
    except NotInParts as reason:
        if is_whole:
            return None
        # what JAX has traced once for all its callers has no line of its own
        reason.line = reason.line or line_of(eqn)
        raise


@dataclass
class Body:
    """A body, and how its equations work on a part.

    Attributes:
      closed: the body, open or closed.
      n: how many parts there are.
      wanted: of variables that some equation takes cut: along which axis.
      state: what a part has of each variable that is not whole.
      treated: the equations that do not work on whole arrays alone, by position.
      zeros: variables that are zero.
    """

    closed: Any
    n: int
    wanted: dict[Any, int] = field(default_factory=dict)
    state: dict[Any, State] = field(default_factory=dict)
    treated: dict[int, Treatment] = field(default_factory=dict)
    zeros: set[Any] = field(default_factory=set)

    @property
    def jaxpr(self) -> Any:
        return jaxprs.split(self.closed)[0]

    def of(self, atom) -> State:
        return self.state.get(atom) if is_var(atom) else None

    def ins(self) -> list[State]:
        return [self.of(v) for v in self.jaxpr.invars]

    def outs(self) -> list[State]:
        return [self.of(v) for v in self.jaxpr.outvars]

    def want(self, atoms: Sequence[Any], states: Sequence[State]) -> None:
        """Notes which variables some equation, or the caller, takes cut."""
        for v, state in zip(atoms, states, strict=True):
            if isinstance(state, int) and is_var(v):
                self.wanted.setdefault(v, state)

    def understand(self, ins: Sequence[State]) -> None:
        """Finds `state` and `treated` of the equations in order, once."""
        self.state, self.treated = {}, {}
        for v, state in zip(self.jaxpr.invars, ins, strict=True):
            self._put(v, self.wanted.get(v) if state is None else state)
        for i, eqn in enumerate(self.jaxpr.eqns):
            if is_zero(eqn, self.zeros):
                self.zeros.update(eqn.outvars)
            wanted = [self.wanted.get(v) for v in eqn.outvars]
            found = treatment(eqn, list(map(self.of, eqn.invars)), wanted, self.n)
            if found is None:
                continue
            if any(s not in (None, SUM) for s in found.outs if not isinstance(s, int)):
                raise NotInParts(eqn, "it needs all examples before the body goes on")
            self.treated[i] = found
            self.want(eqn.invars, found.ins)
            for v, state in zip(eqn.outvars, found.outs, strict=True):
                self._put(v, state)

    def _put(self, v, state: State) -> None:
        if state is not None:
            self.state[v] = state


def is_zero(eqn, zeros: set[Any]) -> bool:
    """Whether an equation makes zeros, of a literal or of others in `zeros`."""
    if eqn.primitive.name not in _ZEROS:
        return False
    v = eqn.invars[0]
    return v in zeros if is_var(v) else jnp.ndim(v.val) == 0 and not v.val


def body_of(
    closed, ins: Sequence[State], outs: Sequence[State], n: int, zeros=()
) -> Body:
    """How a body works on a part, given what it is given and what is asked of it."""
    body = Body(closed, n)
    jaxpr = body.jaxpr
    body.zeros.update(v for v, z in zip(jaxpr.invars, zeros, strict=False) if z)
    body.want(jaxpr.invars, ins)
    body.want(jaxpr.outvars, outs)
    known = -1
    while known != len(body.wanted):  # an array may be wanted after it was made
        known = len(body.wanted)
        body.understand(ins)
    return body


def _joined(eqn, one: State, other: State) -> State:
    """What a part has of what is one or the other."""
    if one is not None and other is not None and one != other:
        raise NotInParts(eqn, "examples along two axes of one array")
    return other if one is None else one


def _down(eqn, states: Sequence[State]) -> list[State]:
    """Of slices of stacks, what a part has of the stacks being known."""
    if any(s == 0 for s in states if isinstance(s, int)):
        raise NotInParts(eqn, "it goes through the examples one after another")
    return [s - 1 if isinstance(s, int) else s for s in states]


def _up(states: Sequence[State]) -> list[State]:
    return [s + 1 if isinstance(s, int) else s for s in states]


def _scan(eqn, ins, wanted, n: int) -> Treatment:
    n_consts, n_carry = _compat.scan_counts(eqn)
    end = n_consts + n_carry
    stacks = _down(eqn, wanted[n_carry:])
    before = [*ins[:end], *_down(eqn, ins[end:])]
    for k, axis in enumerate(wanted[:n_carry]):
        before[n_consts + k] = _joined(eqn, before[n_consts + k], axis)
    while True:
        body = body_of(eqn.params["jaxpr"], before, [*before[n_consts:end], *stacks], n)
        inside, outs = body.ins(), body.outs()
        pairs = zip(inside[n_consts:end], outs[:n_carry], strict=True)
        carry = [_joined(eqn, one, other) for one, other in pairs]
        after = [*inside[:n_consts], *carry, *inside[end:]]
        if after == before:
            break
        before = after
    taken = *before[:end], *_up(before[end:])
    return Treatment(tuple(taken), (*carry, *_up(outs[n_carry:])), (body,))


def _cond(eqn, ins, wanted, n: int) -> Treatment:
    if ins[0] is not None:
        raise NotInParts(eqn, "which branch it takes depends on the examples")
    before, outs = list(ins[1:]), list(wanted)
    while True:
        branches = [body_of(b, before, outs, n) for b in jaxprs.bodies(eqn)]
        after, given = before, outs
        for branch in branches:
            pairs = zip(after, branch.ins(), strict=True)
            after = [_joined(eqn, a, b) for a, b in pairs]
            pairs = zip(given, branch.outs(), strict=True)
            given = [_joined(eqn, a, b) for a, b in pairs]
        if (after, given) == (before, outs):
            return Treatment((None, *before), tuple(outs), tuple(branches))
        before, outs = after, given


def _call(eqn, ins, wanted, n: int) -> Treatment:
    if is_jit(eqn) and (why := why_closed(eqn)):
        raise NotInParts(eqn, why)
    body = body_of(called(eqn), ins, wanted, n)
    return Treatment(tuple(body.ins()), tuple(body.outs()), (body,))


def called(eqn) -> Any:
    """The body of a call; that of a custom rule is its function's, not its rule's."""
    for name in ("jaxpr", "call_jaxpr", "fun_jaxpr"):
        if name in eqn.params:
            return eqn.params[name]
    raise AssertionError(eqn.primitive.name)


# -- running it


@dataclass
class Values:
    """The values of one part.

    Attributes:
      n: how many parts there are.
      part: which one it is, a scalar that may be traced.
      state: what the part has of each variable that is not whole.
      zeros: variables that are zero.
      env: the values that are known.
    """

    n: int
    part: Any
    state: dict[Any, State]
    zeros: set[Any]
    env: dict[Any, Any] = field(default_factory=dict)
    _slices: dict[Any, Any] = field(default_factory=dict)

    def whole(self, v) -> Any:
        return self.env[v]

    def read(self, atom, wanted: State) -> Any:
        """What the part has of an operand, in the form that is wanted."""
        if not is_var(atom):
            zero = not isinstance(wanted, str) or not atom.val
            return atom.val if zero else self._first(jnp.asarray(atom.val))
        have = self.state.get(atom)
        if have == wanted and (have is None or atom in self.env):
            return self.whole(atom) if have is None else self.env[atom]
        assert wanted is not None and have in (None, wanted), (atom, have, wanted)
        if isinstance(wanted, str):
            value = self.whole(atom)
            return value if atom in self.zeros else self._first(value)
        if atom not in self._slices:
            self._slices[atom] = self.slice(self.whole(atom), wanted)
        return self._slices[atom]

    def slice(self, x, axis: int) -> Any:
        size = x.shape[axis] // self.n
        return lax.dynamic_slice_in_dim(x, self.part * size, size, axis)

    def _first(self, x) -> Any:
        """A term of `x`, which counts once: the first part has it."""
        return lax.select(self.part == 0, x, jnp.zeros_like(x))

    def apply(self, eqn, found: Treatment | None) -> None:
        """An equation on the part."""
        states = found.ins if found else [None] * len(eqn.invars)
        pairs = zip(eqn.invars, states, strict=True)
        args = [self.read(v, state) for v, state in pairs]
        outs = _compat.bind(eqn, args) if found is None else self._on(eqn, found, args)
        self.env.update(zip(eqn.outvars, outs, strict=True))

    def _on(self, eqn, found: Treatment, args: list) -> list[Any]:
        if found.inner:
            return self._nested(eqn, found, args)
        axes = lambda states: [s if isinstance(s, int) else None for s in states]
        ins, outs = axes(found.ins), axes(found.outs)
        if all(axis is None for axis in [*ins, *outs]):  # on terms
            return _compat.bind(eqn, args)
        new = _compat.bind(eqn, args, narrowed(eqn, ins, outs, self.n))
        if eqn.primitive.name == "iota" and outs[0] == eqn.params["dimension"]:
            size = new[0].shape[outs[0]]
            new = [new[0] + (self.part * size).astype(new[0].dtype)]
        return new

    def _nested(self, eqn, found: Treatment, args: list) -> list[Any]:
        name, outs = eqn.primitive.name, list(found.outs)
        runs = [partial(_run, body, self.part, outs) for body in found.inner]
        if name == "scan":
            n_consts, n_carry = _compat.scan_counts(eqn)
            inside = [*outs[:n_carry], *_down(eqn, outs[n_carry:])]
            consts, init, xs = split(eqn, args)

            def step(carry, x):
                values = [*consts, *carry, *x]
                new = _run(found.inner[0], self.part, inside, *values)
                return new[:n_carry], new[n_carry:]

            carry, ys = scan_like(eqn, step, init, xs)
            return [*carry, *ys]
        if name == "cond":
            index, *operands = args
            new = _compat.in_context_of(eqn, lax.switch, index, runs, *operands)
            return list(new)
        if name in jaxprs.TAKES_OPEN_JAXPR:
            return jaxprs.rebind(eqn, args, [jax.make_jaxpr(runs[0])(*args)])
        return _compat.in_context_of(eqn, runs[0], *args)


def _run(body: Body, part, outs: Sequence[State], *args) -> list[Any]:
    """A body on a part; `outs`: in which form its outputs are asked for."""
    jaxpr, consts = jaxprs.split(body.closed)
    values = Values(body.n, part, body.state, body.zeros)
    names = [*jaxpr.constvars, *jaxpr.invars]
    values.env.update(zip(names, [*consts, *args], strict=True))
    for i, eqn in enumerate(jaxpr.eqns):
        values.apply(eqn, body.treated.get(i))
    return [values.read(v, s) for v, s in zip(jaxpr.outvars, outs, strict=True)]
