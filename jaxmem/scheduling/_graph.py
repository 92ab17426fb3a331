"""Who makes and who uses the variables of a jaxpr."""

from collections.abc import Sequence, Set
from typing import Any

from jaxmem import _jaxpr
from jaxmem.scheduling._scans import is_var


class Graph:
    """A closed jaxpr with its makers and users, equations named by position."""

    def __init__(self, closed):
        jaxpr, self._consts = _jaxpr.split(closed)
        self.eqns: Sequence[Any] = jaxpr.eqns
        self.invars = [*jaxpr.constvars, *jaxpr.invars]
        self.outvars = jaxpr.outvars
        self.outputs = set(filter(is_var, jaxpr.outvars))
        self.maker = {v: i for i, e in enumerate(self.eqns) for v in e.outvars}
        self.users: dict[Any, list[int]] = {}
        for i, eqn in enumerate(self.eqns):
            for v in filter(is_var, eqn.invars):
                self.users.setdefault(v, []).append(i)

    def inputs(self, args: Sequence[Any]) -> dict[Any, Any]:
        """The values that are there before the first equation."""
        return dict(zip(self.invars, [*self._consts, *args], strict=True))

    def after(self, i: int) -> set[Any]:
        """The variables that need equation `i` to have been done."""
        found = set(self.eqns[i].outvars)
        for eqn in self.eqns[i + 1 :]:
            if any(is_var(v) and v in found for v in eqn.invars):
                found.update(eqn.outvars)
        return found

    def cone(self, v, within: Set[Any]) -> set[int]:
        """The equations that make `v`, as far back as variables of `within` go."""
        todo, found = [v], set()
        while todo:
            i = self.maker.get(todo.pop())
            if i is not None and i not in found:
                found.add(i)
                todo += [w for w in self.eqns[i].invars if is_var(w) and w in within]
        return found
