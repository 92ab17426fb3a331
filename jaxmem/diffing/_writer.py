"""Equations as lines of Python: loops and branches with functions for their bodies."""

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

from jaxmem.diffing._expressions import expression, literal, tuple_of, value
from jaxmem.ir import jaxprs, primitives, scans


class ProgramWriter:
    """The lines of a program, and the names of its values.

    A body reads what is computed around it by its name. What a removed equation
    computes becomes an argument of the whole program, wherever it stood; with `bypass`,
    where an operand has the same type, that operand.
    """

    def __init__(self, removed: frozenset[int], bypass: bool = False):
        self._bypass = bypass
        self.arguments: dict[Any, str] = {}  # variable -> name
        self.read: set[str] = set()  # names
        self._removed = removed
        self._number = 0  # of the next equation
        self._fresh = itertools.count()
        self._names: dict[Any, str] = {}

    def argument(self, v: Any) -> None:
        """Makes a variable an argument of the program."""
        self.arguments[v] = self._names[v] = f"a{len(self.arguments)}"

    def text(self, atom: Any) -> str:
        """The name of an operand, or the literal."""
        if not jaxprs.is_var(atom):
            return literal(atom)
        self.read.add(self._names[atom])
        return self._names[atom]

    def tuple(self, atoms: Sequence[Any]) -> str:
        """Operands as a tuple."""
        return tuple_of([*map(self.text, atoms)])

    def lines(self, jaxpr: Any) -> list[str]:
        """The equations of a jaxpr whose arguments have names."""
        return [line for eqn in jaxpr.eqns for line in self._lines_of(eqn)]

    def _lines_of(self, eqn: Any) -> list[str]:
        number, self._number = self._number, self._number + 1
        if number not in self._removed:
            return [*self._equation(eqn)]
        self._number += sum(1 for body in jaxprs.bodies(eqn) for _ in jaxprs.walk(body))
        for v in eqn.outvars:
            same = (x for x in eqn.invars if jaxprs.is_var(x) and _alike(x, v))
            if self._bypass and (operand := next(same, None)) is not None:
                self._names[v] = self._names[operand]
            else:
                self.argument(v)
        return []

    def _equation(self, eqn: Any) -> Iterator[str]:
        if primitives.is_scan(eqn):
            return self._scan(eqn)
        if primitives.is_while(eqn):
            return self._while(eqn)
        if primitives.is_branch(eqn):
            return self._branch(eqn)
        return self._plain(eqn)

    def _plain(self, eqn: Any) -> Iterator[str]:
        names = [self.text(v) if jaxprs.is_var(v) else None for v in eqn.invars]
        text = expression(eqn, names)
        several = eqn.primitive.multiple_results
        yield f"{self._new(eqn.outvars, several)} = {text}"

    def _scan(self, eqn: Any) -> Iterator[str]:
        body = jaxprs.split(jaxprs.bodies(eqn)[0])[0]
        consts, carry, xs = scans.split(eqn, eqn.invars)
        n, m = len(consts), len(carry)
        yield from self._given(body.invars[:n], consts)
        name = f"body{next(self._fresh)}"
        yield f"def {name}(carry, xs):"
        inside = {"carry": body.invars[n : n + m], "xs": body.invars[n + m :]}
        if given := {of: self._new(found) for of, found in inside.items() if found}:
            yield f"    {', '.join(given.values())} = {', '.join(given)}"
        yield from _indented(self.lines(body))
        outs = self.tuple(body.outvars[:m]), self.tuple(body.outvars[m:])
        yield f"    return {tuple_of(outs)}"
        usual = {"length": None, "reverse": False, "unroll": 1}
        how = [
            f"{k}={value(eqn.params[k])}"
            for k, v in usual.items()
            if eqn.params[k] != v
        ]
        init = f"{self.tuple(carry)}, {self.tuple(xs)}"
        outs = f"{self._new(eqn.outvars[:m])}, {self._new(eqn.outvars[m:])}"
        yield f"({outs}) = lax.scan({name}, {init}, {', '.join(how)})"

    def _while(self, eqn: Any) -> Iterator[str]:
        counts = eqn.params["body_nconsts"], eqn.params["cond_nconsts"]
        n = sum(counts)
        of_cond, of_body = eqn.invars[: counts[1]], eqn.invars[counts[1] : n]
        names = []
        # in the order of `jaxprs.bodies`, by which equations are numbered
        for kind, given in (("body", of_body), ("cond", of_cond)):
            jaxpr = jaxprs.split(eqn.params[f"{kind}_jaxpr"])[0]
            yield from self._given(jaxpr.invars[: len(given)], given)
            names.append(f"{kind}{next(self._fresh)}")
            yield f"def {names[-1]}(carry):"
            yield f"    {self._new(jaxpr.invars[len(given) :])} = carry"
            yield from _indented(self.lines(jaxpr))
            give = self.tuple if kind == "body" else lambda outs: self.text(outs[0])
            yield f"    return {give(jaxpr.outvars)}"
        init = self.tuple(eqn.invars[n:])
        call = f"lax.while_loop({names[1]}, {names[0]}, {init})"
        yield f"{self._new(eqn.outvars)} = {call}"

    def _branch(self, eqn: Any) -> Iterator[str]:
        names = []
        for body in jaxprs.bodies(eqn):
            jaxpr = jaxprs.split(body)[0]
            names.append(f"branch{next(self._fresh)}")
            given = self._new(jaxpr.invars)[1:-1].rstrip(",")
            yield f"def {names[-1]}({given}):"
            yield from _indented(self.lines(jaxpr))
            yield f"    return {self.tuple(jaxpr.outvars)}"
        inside = ", ".join(map(self.text, eqn.invars[1:]))
        call = f"lax.switch({self.text(eqn.invars[0])}, [{', '.join(names)}], {inside})"
        yield f"{self._new(eqn.outvars)} = {call}"

    def _given(self, inside: Sequence[Any], outside: Sequence[Any]) -> Iterator[str]:
        """Names of what a body is given that does not change; literals get one."""
        for v, atom in zip(inside, outside, strict=True):
            if jaxprs.is_var(atom):
                self._names[v] = self._names[atom]
            else:
                yield f"{self._new([v], False)} = {literal(atom)}"

    def _new(self, variables: Sequence[Any], several: bool = True) -> str:
        """New names of variables that are computed here."""
        for v in variables:
            self._names[v] = f"x{next(self._fresh)}"
        names = [self._names[v] for v in variables]
        return tuple_of(names) if several else names[0]


def _alike(one: Any, other: Any) -> bool:
    types = ((v.aval.shape, v.aval.dtype) for v in (one, other))
    return len({*types}) == 1


def _indented(lines: Sequence[str]) -> list[str]:
    return [f"    {line}" for line in lines]
