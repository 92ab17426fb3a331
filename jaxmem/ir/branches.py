"""A `cond` along the layer axis: each of its branches works layer by layer.

That is so where one predicate holds for all layers, and all that the branches do treats
the layer axis as a batch axis. Then the `cond` of a stack is, in a scan over layers,
the `cond` of each layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax

from jaxmem import _compat
from jaxmem.ir import jaxprs, layer_axis, primitives
from jaxmem.ir.layer_axis import Axis, Batched, Treatment, narrow, operand_axes
from jaxmem.ir.scans import is_var
from jaxmem.ir.types import JaxprEqn


def treatment(eqn: JaxprEqn, axes: Sequence[Axis]) -> Treatment:
    """`layer_axis.treatment`, of a `cond` too."""
    if not primitives.is_branch(eqn):
        return layer_axis.treatment(eqn, axes)
    if axes[0] is not None:
        return "which branch it takes depends on the layer"
    if _compat.has_side_effects(eqn):
        return "it has side effects"
    found = _branches(eqn, list(axes[1:]), [None] * len(eqn.outvars))
    if isinstance(found, str):
        return found
    ins, outs = found[0].ins(), found[0].outs()
    if any(axis is None for axis in outs):
        return "an output of it does not run along the layers"
    return Batched((None, *ins), tuple(a for a in outs if a is not None))


def of_layers(
    eqn: JaxprEqn, args: Sequence[Any], treated: Batched, size: int = 1
) -> list[Any]:
    """Outputs of `eqn` on operands cut to `size` layers, where `treated` says."""
    if not primitives.is_branch(eqn):
        return _compat.bind(eqn, list(args), narrow(eqn, treated.outs, size))
    branches = _branches(eqn, list(treated.ins[1:]), list(treated.outs))
    assert not isinstance(branches, str), branches
    index, *operands = args
    runs = [partial(branch.run, size) for branch in branches]
    return list(_compat.in_context_of(eqn, jax.lax.switch, index, runs, *operands))


@dataclass
class _Branch:
    """A branch, and where its variables have the layers.

    Attributes:
      body: the branch.
      wanted: of variables that some operation needs by layers: along which axis.
      axis: of all variables that run along the layers.
      treated: how equations that make such variables are done, by position.
    """

    body: Any
    wanted: dict[Any, int] = field(default_factory=dict)
    axis: dict[Any, int] = field(default_factory=dict)
    treated: dict[int, Batched] = field(default_factory=dict)

    @property
    def jaxpr(self) -> Any:
        return jaxprs.split(self.body)[0]

    def ins(self) -> list[Axis]:
        return [self.wanted.get(v) for v in self.jaxpr.invars]

    def outs(self) -> list[Axis]:
        return [self.axis.get(v) if is_var(v) else None for v in self.jaxpr.outvars]

    def want(self, atoms: Sequence[Any], axes: Sequence[Axis]) -> str:
        """Notes which variables are needed by layers; why they cannot be, or ""."""
        for v, axis in zip(atoms, axes, strict=True):
            if axis is None:
                continue
            if not is_var(v):
                return "a constant in it is of no layer"
            if self.wanted.setdefault(v, axis) != axis:
                return "layers along different axes"
        return ""

    def understand(self) -> str:
        """Finds `axis` and `treated`; what prevents it, or ""."""
        known = -1
        while known != len(self.wanted):  # an operand may be needed after it was made
            known = len(self.wanted)
            self.axis = {
                v: self.wanted[v] for v in self.jaxpr.invars if v in self.wanted
            }
            for i, eqn in enumerate(self.jaxpr.eqns):
                if why := self._through(i, eqn):
                    return f"in a branch, {primitives.quoted(eqn)}: {why}"
        return ""

    def _through(self, i: int, eqn: JaxprEqn) -> str:
        axes = [self.axis.get(v) if is_var(v) else None for v in eqn.invars]
        if any(axis is not None for axis in axes):
            treated = treatment(eqn, axes)
        else:
            treated = self._cut(eqn)
        if treated is None:
            return ""
        if not isinstance(treated, Batched):
            return treated if isinstance(treated, str) else "it combines the layers"
        if any(a not in (None, b) for a, b in zip(axes, treated.ins, strict=True)):
            return "layers along different axes"
        self.treated[i] = treated
        self.axis.update(zip(eqn.outvars, treated.outs, strict=True))
        return self.want(eqn.invars, treated.ins)

    def _cut(self, eqn: JaxprEqn) -> Treatment | None:
        """How to make a layer of what was made of no layers; None if nobody asks."""
        wanted = [self.wanted[v] for v in eqn.outvars if v in self.wanted]
        if not wanted:
            return None
        ins = operand_axes(eqn, wanted[0])
        return (
            "its output is not of layers" if ins is None else Batched(ins, (*wanted,))
        )

    def run(self, size: int, *args: Any) -> list[Any]:
        """The branch of `size` layers."""
        position = {id(eqn): i for i, eqn in enumerate(self.jaxpr.eqns)}

        def rule(eqn: JaxprEqn, values: list[Any]) -> list[Any] | None:
            treated = self.treated.get(position[id(eqn)])
            return None if treated is None else of_layers(eqn, values, treated, size)

        return jaxprs.evaluate(self.body, args, rule)


def _branches(eqn: JaxprEqn, ins: list[Axis], outs: list[Axis]) -> list[_Branch] | str:
    """The branches, which agree on the axes of operands and outputs; or why not."""
    branches = [_Branch(body) for body in jaxprs.bodies(eqn)]
    before: Any = None
    # what one branch needs by layers, the others must take and give by layers
    while before != (ins, outs):
        before = (list(ins), list(outs))
        for branch in branches:
            jaxpr = branch.jaxpr
            why = branch.want(jaxpr.invars, ins) or branch.want(jaxpr.outvars, outs)
            if why := why or branch.understand():
                return why
            ins = branch.ins()
            for i, axis in enumerate(branch.outs()):
                if None is not outs[i] != axis:
                    return "its branches have the layers along different axes"
                outs[i] = axis if outs[i] is None else outs[i]
    return branches
