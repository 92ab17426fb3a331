"""Donation that did not happen, and arguments whose bytes are there twice.

An argument is kept twice when its buffer cannot be given up but a second array takes
its place: either the step returns an updated array of the same shape and dtype that is
computed from it element by element (parameters, moments) and it is not donated, or the
compiled program copies the argument as it is. Gradients are no updated arguments: they
reach their output through a product or a sum, or from a backward pass, which may be
elementwise in the argument (that of a norm which divides by its scale is).
"""

import collections
import dataclasses
import math
import re
from collections.abc import Collection, Iterator, Sequence, Set
from typing import Any

import jax

from jaxmem import _compat
from jaxmem._jaxpr import bodies, split
from jaxmem.frameworks import Form
from jaxmem.memory._bytes import format_bytes
from jaxmem.memory._step import Step

_MIN_BYTES = 1024
_ELEMENTWISE = frozenset(
    "abs add add_any and ceil clamp convert_element_type copy copy_p cos div erf exp "
    "expm1 floor integer_pow log log1p logistic max min mul name ne neg not "
    "optimization_barrier or pow reduce_precision rem round rsqrt scatter scatter-add "
    "select_n sharding_constraint sign sin sqrt square sub tanh dynamic_update_slice "
    "xor".split()
)
_CALLS = frozenset(
    "jit pjit closed_call core_call custom_jvp_call custom_vjp_call remat checkpoint "
    "remat2 custom_vjp_call_jaxpr".split()
)


@dataclasses.dataclass(frozen=True)
class Donations:
    """What of a step the notes on donation are made of, as plain data.

    Attributes:
      step: its leaves, without the user's trees, static values and shardings.
      kept: the leaves that the program takes.
      out_avals: shape and dtype of its outputs.
      sizes: bytes on one device of each leaf that the program takes.
      updated: leaf -> the output that is its updated value.
    """

    step: Step
    kept: tuple[int, ...]
    out_avals: tuple[Any, ...]
    sizes: dict[int, int]
    updated: dict[int, int]

    def notes(self, aliases: Sequence[tuple[str, int]], hlo: str) -> tuple[str, ...]:
        """Sentences for the report; arguments of less than a kibibyte are left out.

        Args:
          aliases: (output index, leaf) of each buffer that an output reuses.
          hlo: the text of the compiled module.
        """
        unused = list(self._unused({index for _, index in aliases}))
        twice = {
            i: "it is not donated, and the step returns its updated value: donate it"
            for i in self.updated
            if not self.step.leaves[i].donated
        }
        for number in copied_parameters(hlo):
            twice.setdefault(
                self.kept[number], "the compiled program copies it as it is"
            )
        big = {i: why for i, why in twice.items() if self.sizes.get(i, 0) >= _MIN_BYTES}
        return (*unused, *_grouped("kept twice", big, self.step, self.sizes))

    def _unused(self, aliased: set[int]) -> Iterator[str]:
        why = unused_donations(self.step, self.kept, self.out_avals, aliased)
        sizes = {i: whole_bytes(self.step, i) for i in why}
        big = {i: text for i, text in why.items() if sizes[i] >= _MIN_BYTES}
        return _grouped("donated but not reused", big, self.step, sizes)


def donations(
    step: Step, traced: Any, kept: Sequence[int], out_avals: Sequence[Any]
) -> Donations:
    """The plain data of a traced and lowered step."""

    def bare(aval: Any) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(aval.shape, aval.dtype)

    leaves = (dataclasses.replace(x, spec=bare(x.spec)) for x in step.leaves)
    return Donations(
        dataclasses.replace(step, leaves=tuple(leaves), treedef=None, form=Form()),
        tuple(kept),
        tuple(map(bare, out_avals)),
        {i: device_bytes(step.leaves[i].spec) for i in kept},
        updated_arguments(traced.jaxpr),
    )


def device_bytes(spec: jax.ShapeDtypeStruct) -> int:
    """Bytes of an array on one device."""
    sharding = spec.sharding
    shape = spec.shape if sharding is None else sharding.shard_shape(spec.shape)
    return math.prod(shape) * spec.dtype.itemsize


def unused_donations(
    step: Step, kept: Collection[int], out_avals: Sequence[Any], aliased: Set[int]
) -> dict[int, str]:
    """{donated leaf: why no output has its buffer}; `kept` are those the step reads."""
    donated = [i for i, leaf in enumerate(step.leaves) if leaf.donated]
    outputs = collections.Counter((a.shape, a.dtype) for a in out_avals)
    kinds = [_kind(step, i) for i in donated]
    why = {}
    for i in donated:
        kind = _kind(step, i)
        if i in aliased:
            continue
        if i not in kept:
            why[i] = "the step does not read it"
        elif not outputs[kind]:
            why[i] = "no output has its shape and dtype"
        elif kinds.count(kind) > outputs[kind]:
            why[i] = "each output of its shape and dtype already has another's buffer"
        else:
            why[i] = "the compiler gave no output its buffer (sharding, layout or use)"
    return why


def _kind(step: Step, index: int) -> tuple[Any, Any]:
    spec = step.leaves[index].spec
    return spec.shape, spec.dtype


def whole_bytes(step: Step, index: int) -> int:
    """Bytes of an argument, on all devices together."""
    spec = step.leaves[index].spec
    return spec.size * spec.dtype.itemsize


def _grouped(
    what: str, reasons: dict[int, str], step: Step, sizes: dict[int, int]
) -> Iterator[str]:
    """One sentence a reason, its arguments named, the largest first."""
    groups: dict[str, list[int]] = {}
    for index, why in reasons.items():
        groups.setdefault(why, []).append(index)
    for why, indices in groups.items():
        indices.sort(key=lambda i: -sizes[i])
        total = format_bytes(sum(sizes[i] for i in indices))
        names = ", ".join(
            f"{step.leaves[i].name} ({format_bytes(sizes[i])})" for i in indices[:4]
        )
        more = f" and {len(indices) - 4} more" if len(indices) > 4 else ""
        yield f"{what}: {names}{more}, {total} in all: {why}"


def updated_arguments(jaxpr: Any) -> dict[int, int]:
    """{argument: output} where the output is the argument's updated value.

    Each output takes one of the arguments it comes from, those with the fewest to
    choose from first: p - m / sqrt(v) comes from p, m and v, the new m from m alone.
    """
    jaxpr, _ = split(jaxpr)
    origins = _origins(jaxpr, [frozenset([i]) for i in range(len(jaxpr.invars))])
    outputs = [
        (sorted(i for i in found if _same(jaxpr.invars[i], var)), place)
        for place, (var, found) in enumerate(zip(jaxpr.outvars, origins, strict=True))
    ]
    matched: dict[int, int] = {}
    for candidates, place in sorted(outputs, key=lambda item: len(item[0])):
        free = [i for i in candidates if i not in matched]
        if free:
            matched[free[0]] = place
    return matched


def _origins(jaxpr: Any, inputs: list[frozenset[int]]) -> list[frozenset[int]]:
    """For each output the arguments that reach it element by element."""
    known: dict[Any, frozenset[int]] = dict(zip(jaxpr.invars, inputs, strict=True))

    def read(atom: Any) -> frozenset[int]:
        return frozenset() if hasattr(atom, "val") else known.get(atom, frozenset())

    for eqn in jaxpr.eqns:
        found = [read(v) for v in eqn.invars]
        if not any(found):
            continue
        for var, origin in zip(eqn.outvars, _through(eqn, found), strict=True):
            known[var] = origin
    return [read(v) for v in jaxpr.outvars]


def _through(eqn: Any, found: list[frozenset[int]]) -> list[frozenset[int]]:
    name = eqn.primitive.name
    if "transpose(" in _compat.name_stack(eqn):  # of a backward pass
        return [frozenset()] * len(eqn.outvars)
    inner = bodies(eqn) if name in _CALLS else []
    if inner and len(split(inner[0])[0].invars) == len(found):
        return _origins(split(inner[0])[0], found)
    if name not in _ELEMENTWISE:
        return [frozenset()] * len(eqn.outvars)
    return [
        frozenset().union(
            *(f for v, f in zip(eqn.invars, found, strict=True) if _same_shape(v, out))
        )
        for out in eqn.outvars
    ]


def _same_shape(one: Any, other: Any) -> bool:
    return getattr(one.aval, "shape", None) == getattr(other.aval, "shape", None)


def _same(one: Any, other: Any) -> bool:
    return _same_shape(one, other) and one.aval.dtype == other.aval.dtype


def copied_parameters(hlo: str) -> list[int]:
    """Numbers of the program's parameters that its entry copies unchanged."""
    start = hlo.find("\nENTRY ")
    entry = hlo[start : hlo.find("\n}", start)] if start >= 0 else ""
    parameters = {
        name: (shape, int(number))
        for name, shape, number in re.findall(
            r"%?([\w.\-]+) = (\w+\[[\d,]*\])\S* parameter\((\d+)\)", entry
        )
    }
    copies = re.findall(
        r"= \(?(\w+\[[\d,]*\])[^=]*? (?:copy|copy-start)\("
        r"(?:\w+\[[\d,]*\]\S* )?%?([\w.\-]+)\)",
        entry,
    )
    found = {
        parameters[name][1]
        for shape, name in copies
        if name in parameters and parameters[name][0] == shape
    }
    return sorted(found)
