"""Outputs of a scan that are slices of what it reads: the arrays that it has read.

The body of a layer that returns the whole state of an nnx module, as `nnx.scan` does
over an `nnx.remat`, stacks the parameters once more. JAX hands on an output that is an
input of the body, and does not look into a `jax.checkpoint`. An optimizer that updates
the model then reads the copy.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from jaxmem import _compat
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.graph import JaxprGraph, Values, done_otherwise
from jaxmem.ir.scans import is_var, run_body, scan_like, split, ys_of
from jaxmem.ir.shard_labels import labelled_shardings
from jaxmem.memory import format_bytes
from jaxmem.scheduling._pass import Level, Pass
from jaxmem.scheduling.plan.rows import Description

Places = Mapping[int, int]  # position among the stacks -> among the arrays read


@dataclass(frozen=True)
class PassedOn:
    """Nothing can be chosen: what it does never costs."""

    name: ClassVar[str] = "passed on"


@dataclass(frozen=True)
class Copies:
    """Stacks of scans that are copies of what these read."""

    places: Mapping[int, Places]  # of each scan, by its place in the list
    bytes: int  # of all of them, on one device


class PassOnSlices(Pass[PassedOn, Copies]):
    """Such outputs are taken from the scan's inputs, and not stacked."""

    config = PassedOn

    def analyse(self, level: Level, config: PassedOn) -> Iterator[Copies]:
        found, size = {}, 0
        shardings = labelled_shardings(level.jaxpr, level.shardings)
        for i, eqn in enumerate(JaxprGraph(level.jaxpr).eqns):
            if primitives.is_scan(eqn) and (places := _places(eqn)):
                found[i] = places
                size += sum(shardings.bytes_of(ys_of(eqn)[k]) for k in places)
        if found:
            yield Copies(found, size)

    def apply(self, level: Level, rewrite: Copies):
        graph = JaxprGraph(level.jaxpr)
        instead = {
            i: partial(_without_copies, graph.eqns[i], places)
            for i, places in rewrite.places.items()
        }
        return done_otherwise(level.jaxpr, graph, instead)

    def describe(self, rewrite: Copies, target: str) -> Description:
        size = format_bytes(rewrite.bytes)
        note = f"{size} that scans stack as they have read it are not copied"
        return Description(notes=(note,))


def _places(eqn) -> Places:
    body, _ = jaxprs.split(eqn.params["jaxpr"])
    n_consts, n_carry = _compat.scan_counts(eqn)
    read = {v: k for k, v in enumerate(body.invars[n_consts + n_carry :])}
    origins = (_origin(body, v) for v in body.outvars[n_carry:])
    return {k: read[v] for k, v in enumerate(origins) if v in read}


def _origin(jaxpr, atom) -> Any:
    """The variable that checkpoints around it return unchanged; None for a literal."""
    makers = {v: e for e in jaxpr.eqns for v in e.outvars}
    while is_var(atom) and atom in makers:
        eqn = makers[atom]
        # only a checkpoint hides from JAX that an output is an input
        if not primitives.is_remat(eqn):
            return atom
        (inner,) = jaxprs.bodies(eqn)
        inner, _ = jaxprs.split(inner)
        found = _origin(inner, inner.outvars[eqn.outvars.index(atom)])
        if found not in inner.invars:
            return atom
        atom = eqn.invars[inner.invars.index(found)]
    return atom if is_var(atom) else None


def _without_copies(eqn, places: Places, values: Values) -> list[Any]:
    consts, init, xs = split(eqn, [values.read(v) for v in eqn.invars])

    def step(carry, x):
        carry, ys = run_body(eqn, consts, carry, x)
        # for None a scan stacks nothing
        return carry, [None if k in places else y for k, y in enumerate(ys)]

    ends, ys = scan_like(eqn, step, init, xs)
    return [*ends, *(xs[places[k]] if k in places else y for k, y in enumerate(ys))]
