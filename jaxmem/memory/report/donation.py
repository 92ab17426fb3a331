"""Donation that did not happen, and arguments that are in memory twice.

An argument is in memory twice when its buffer cannot be reused although a second array
takes its place: the step returns its updated value and it is not donated, or the
compiled program copies it as it is.
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Sequence, Set
from typing import Any

import jax

from jaxmem import _compat
from jaxmem._bytes import format_bytes
from jaxmem.frameworks import Form
from jaxmem.ir import primitives
from jaxmem.ir.jaxprs import bodies, split
from jaxmem.memory.compile.call import FlatCall
from jaxmem.memory.compile.lower import LoweredStep

_MIN_BYTES = 1024
_OTHER_MEMORY = re.compile(r"S\([1-9]\d*\)")  # in a layout; 0 is the device's own
_SHOWN = 4


@dataclasses.dataclass(frozen=True)
class Donations:
    """What the notes on donation are made from, as plain data."""

    call: FlatCall  # the step's, without the user's trees, static values and shardings
    used: tuple[int, ...]  # the leaves that the program takes
    out_avals: tuple[Any, ...]  # shape and dtype of its outputs
    sizes: dict[int, int]  # bytes on one device of each leaf that the program takes
    updated: dict[int, int]  # leaf -> the output that is its updated value

    def notes(self, aliases: Sequence[tuple[str, int]], hlo: str) -> tuple[str, ...]:
        """Sentences for the report; arguments of less than a kibibyte are left out."""
        unused = list(self._unused({index for _, index in aliases}))
        doubled = {
            i: "it is not donated, and the step returns its updated value: donate it"
            for i in self.updated
            if not self.call.leaves[i].donated
        }
        for number in copied_parameters(hlo):
            reason = "the compiled program copies it as it is"
            doubled.setdefault(self.used[number], reason)
        large = {i: r for i, r in doubled.items() if self.sizes.get(i, 0) >= _MIN_BYTES}
        return (*unused, *_sentences("in memory twice", large, self.call, self.sizes))

    def _unused(self, aliased: set[int]) -> Iterator[str]:
        reasons = unused_donations(self.call, self.used, self.out_avals, aliased)
        sizes = {i: whole_bytes(self.call, i) for i in reasons}
        large = {i: r for i, r in reasons.items() if sizes[i] >= _MIN_BYTES}
        return _sentences("donated but not reused", large, self.call, sizes)


def donations(lowered: LoweredStep, traced: Any) -> Donations:
    """The plain data of a traced and lowered step."""

    def bare(aval: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    call = lowered.call
    leaves = tuple(dataclasses.replace(x, spec=bare(x.spec)) for x in call.leaves)
    return Donations(
        dataclasses.replace(call, leaves=leaves, treedef=None, form=Form()),
        lowered.used,
        tuple(map(bare, lowered.out_avals)),
        {i: device_bytes(call.leaves[i].spec) for i in lowered.used},
        updated_arguments(traced.jaxpr),
    )


def device_bytes(array: Any) -> int:
    """Bytes of an array, or of the type of one, on one device."""
    sharding = getattr(array, "sharding", None)
    shape = array.shape if sharding is None else sharding.shard_shape(array.shape)
    return math.prod(shape) * array.dtype.itemsize


def unused_donations(
    call: FlatCall, used: Collection[int], out_avals: Sequence[Any], aliased: Set[int]
) -> dict[int, str]:
    """Donated leaves whose buffer no output has, and the reason."""
    donated = [i for i, leaf in enumerate(call.leaves) if leaf.donated]
    outputs = collections.Counter((a.shape, a.dtype) for a in out_avals)
    kinds = [_kind(call, i) for i in donated]
    reasons = {}
    for i in donated:
        kind = _kind(call, i)
        if i in aliased:
            continue
        if i not in used:
            reasons[i] = "the step does not read it"
        elif not outputs[kind]:
            reasons[i] = "no output has its shape and dtype"
        elif kinds.count(kind) > outputs[kind]:
            reasons[i] = "each output of its shape and dtype already has another buffer"
        else:
            reasons[i] = (
                "the compiler gave no output its buffer (sharding, layout or use)"
            )
    return reasons


def _kind(call: FlatCall, index: int) -> tuple[Any, Any]:
    spec = call.leaves[index].spec
    return spec.shape, spec.dtype


def whole_bytes(call: FlatCall, index: int) -> int:
    """Bytes of an argument, on all devices together."""
    spec = call.leaves[index].spec
    return spec.size * spec.dtype.itemsize


def _sentences(
    what: str, reasons: dict[int, str], call: FlatCall, sizes: dict[int, int]
) -> Iterator[str]:
    """One sentence for each reason that names its arguments, the largest first."""
    by_reason: dict[str, list[int]] = {}
    for index, reason in reasons.items():
        by_reason.setdefault(reason, []).append(index)
    for reason, indices in by_reason.items():
        indices.sort(key=lambda i: -sizes[i])
        total = format_bytes(sum(sizes[i] for i in indices))
        names = ", ".join(
            f"{call.leaves[i].name} ({format_bytes(sizes[i])})"
            for i in indices[:_SHOWN]
        )
        rest = len(indices) - _SHOWN
        others = f" and {rest} more" if rest > 0 else ""
        yield f"{what}: {names}{others}, {total} in all: {reason}"


def updated_arguments(jaxpr: Any) -> dict[int, int]:
    """{argument: output} where the output is the argument's updated value."""
    # Each output takes one of the arguments that it is computed from. Those with the
    # fewest to choose from choose first: p - m / sqrt(v) is computed from p, m and v,
    # the new m from m alone.
    jaxpr, _ = split(jaxpr)
    sources = _sources(jaxpr, [frozenset([i]) for i in range(len(jaxpr.invars))])
    outputs = [
        (sorted(i for i in known if _is_alike(jaxpr.invars[i], var)), place)
        for place, (var, known) in enumerate(zip(jaxpr.outvars, sources, strict=True))
    ]
    matched: dict[int, int] = {}
    for candidates, place in sorted(outputs, key=lambda item: len(item[0])):
        free = [i for i in candidates if i not in matched]
        if free:
            matched[free[0]] = place
    return matched


def _sources(jaxpr: Any, inputs: list[frozenset[int]]) -> list[frozenset[int]]:
    """For each output the arguments that it is computed from element by element."""
    known: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> frozenset[int]:
        return frozenset() if hasattr(atom, "val") else known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        operands = [read(v) for v in eqn.invars]
        if any(operands):
            known.update(zip(eqn.outvars, _sources_of(eqn, operands), strict=True))
    return [read(v) for v in jaxpr.outvars]


def _sources_of(eqn: Any, operands: list[frozenset[int]]) -> list[frozenset[int]]:
    """The same for the outputs of one equation."""
    known = primitives.of(eqn)
    # A gradient is not an updated argument, although the backward pass may be
    # elementwise in the argument, as that of a norm that divides by its scale.
    if "transpose(" in _compat.name_stack(eqn):
        return [frozenset()] * len(eqn.outvars)
    inner = bodies(eqn) if known.calls else []
    if inner and len(split(inner[0])[0].invars) == len(operands):
        return _sources(split(inner[0])[0], operands)
    if not (known.elementwise or known.same or known.into_first):
        return [frozenset()] * len(eqn.outvars)
    pairs = list(zip(eqn.invars, operands, strict=True))
    return [
        frozenset().union(*(sources for v, sources in pairs if _has_shape_of(v, out)))
        for out in eqn.outvars
    ]


def _has_shape_of(one: Any, other: Any) -> bool:
    return getattr(one.aval, "shape", None) == getattr(other.aval, "shape", None)


def _is_alike(one: Any, other: Any) -> bool:
    return _has_shape_of(one, other) and one.aval.dtype == other.aval.dtype


def copied_parameters(hlo: str) -> list[int]:
    """Numbers of the program's parameters that its entry computation copies."""
    start = hlo.find("\nENTRY ")
    entry = hlo[start : hlo.find("\n}", start)] if start >= 0 else ""
    parameters = {
        name: (shape, int(number))
        for name, shape, number in re.findall(
            r"%?([\w.\-]+) = (\w+\[[\d,]*\])\S* parameter\((\d+)\)", entry
        )
    }
    copies = re.findall(
        r"= \(?(\w+\[[\d,]*\])(\{[^}]*\})?[^=]*? (?:copy|copy-start)\("
        r"(?:\w+\[[\d,]*\]\S* )?%?([\w.\-]+)\)",
        entry,
    )
    # A copy of another shape is a part of the parameter, and does not double it. Nor
    # does one into another memory, as a TPU's prefetch to the memory beside its cores.
    copied = {
        parameters[name][1]
        for shape, layout, name in copies
        if name in parameters
        and parameters[name][0] == shape
        and not _OTHER_MEMORY.search(layout)
    }
    return sorted(copied)
