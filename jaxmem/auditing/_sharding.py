"""How the values of a module that is partitioned differ among devices.

Every device runs one program. It starts from parameters whose shards the text names,
and from its own number; from there each value's *sharded* is followed through the
module: which devices have the same value, and along which axes the devices hold
different parts of an array. What goes around among neighbours (a collective-permute)
may become the same on all of them in ways that are not followed here.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from jaxmem.auditing import _axes
from jaxmem.auditing._exact import Exact, exact, numbers_of_devices
from jaxmem.memory.buffers import Hlo, Instruction
from jaxmem.memory.buffers.device_groups import (
    Labels,
    groups_of,
    labels_of,
    shards_of,
    sources_of,
)
from jaxmem.memory.buffers.shapes import arrays_of, elements_of

_SAME = frozenset("opt-barrier optimization-barrier add-dependency domain".split())
_JOINS = frozenset(
    "all-reduce all-gather reduce-scatter all-to-all collective-broadcast".split()
)
# what may send anything, or takes it from elsewhere
_UNKNOWN = frozenset(
    "ragged-all-to-all send recv infeed outfeed rng after-all "
    "rng-get-and-update-state".split()
)
_MAY_SEND = ("tpu_custom_call", "mosaic_gpu", "xla_ffi_python")
_STEPS = 50  # rounds over a loop, of which each makes its carry differ more


class ShardedPart(NamedTuple):
    """A stretch of an axis, and devices of one label have the same of it."""

    axis: int
    start: int
    stop: int
    who: Labels


class DeviceSharding(NamedTuple):
    """How a value differs among devices.

    Attributes:
      who: devices of one label have the same value.
      where: of each axis, which part of a larger array a device has; None where the
        axis is whole, or nothing is known.
      exact: its elements on each device, where they follow from the device's number.
      loose: whether devices of different labels may have the same value, for all that
        is known.
      parts: those that were put side by side, where it is made of several.
    """

    who: Labels
    where: tuple[Labels | None, ...] = ()
    exact: Exact | None = None
    loose: bool = False
    parts: tuple[ShardedPart, ...] = ()


Value = DeviceSharding | None | list  # a list for a tuple; None where nothing is known


class Join(NamedTuple):
    """A collective, one of the arrays that it joins, and whose groups choose it."""

    made: Instruction
    operand: DeviceSharding | None
    groups: tuple[tuple[int, ...], ...]
    control: Labels  # devices of one label have come here alike


@dataclass
class ModuleShardings:
    """The shardings of a module's values, the entry computation's first.

    `shards`: of the parameters, by their numbers, where the text does not tell them.
    """

    hlo: Hlo
    shards: Sequence[tuple[Labels, ...] | None] = ()
    joins: dict[tuple[str, int], Join] = field(default_factory=dict)
    outputs: list[DeviceSharding | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.devices = self.hlo.devices
        self.alike: Labels = (0,) * self.devices
        self._control: list[Labels] = [self.alike]
        if self.devices > 1:
            result = self._computation(self.hlo.entry, None)
            self.outputs = list(leaves(result))

    def _computation(self, name: str, arguments: Sequence[Value] | None) -> Value:
        """The result of a computation; of the entry one without arguments."""
        known: dict[str, Value] = {}
        for made in self.hlo.body(name):
            if made.opcode == "parameter":
                known[made.name] = (
                    self._parameter(made)
                    if arguments is None
                    else arguments[made.element]
                )
            else:
                known[made.name] = self._instruction(made, known)
        return known.get(self.hlo.roots.get(name, ""))

    def _parameter(self, made: Instruction) -> Value:
        arrays = arrays_of(made.shape)
        if made.shape.startswith("(") or len(arrays) != 1:
            return None
        shards = shards_of(made.attributes, len(arrays[0].sizes), self.devices)
        if shards is None and made.element < len(self.shards):
            shards = self.shards[made.element]
        if shards is None or any(len(one) != self.devices for one in shards):
            return None
        where = tuple(None if _is_alike(one) else one for one in shards)
        return DeviceSharding(_refined(self.alike, *shards), where)

    def _instruction(self, made: Instruction, known: dict[str, Value]) -> Value:
        operands = [self._operand(name, known) for name in made.operands]
        if _hands_on(made.opcode):
            return operands[0] if operands else None
        match made.opcode:
            case "tuple":
                return operands
            case "get-tuple-element":
                return _element(operands[0], made.element)
            case "partition-id":
                own = numbers_of_devices(self.devices)
                return DeviceSharding(own.labels, exact=own)
            case "while":
                return self._loop(made, operands[0])
            case "conditional":
                return self._conditional(made, operands)
            case "call" | "fusion" | "async-start" if made.called:
                return self._computation(made.called[0], operands)
        return self._operation(made, operands)

    def _operation(self, made: Instruction, operands: Sequence[Value]) -> Value:
        """What is sent, or computed; None where nothing is known of what is sent."""
        base = made.opcode.removesuffix("-start")
        if base == "collective-permute":
            moved = [self._permuted(made, one) for one in operands]
            return moved if len(moved) > 1 else moved[0]
        if base in _JOINS:
            return self._join(made, base, operands)
        if base in _UNKNOWN or _may_send(made, operands):
            return None
        return self._computed(made, operands)

    def _operand(self, name: str, known: dict[str, Value]) -> Value:
        base, *path = name.split("#")
        value = known.get(base)
        for index in path:
            value = _element(value, int(index))
        return value

    def _computed(self, made: Instruction, operands: Sequence[Value]) -> Value:
        """An operation that each device does on its own."""
        arrays: list[DeviceSharding] = []
        for one in (one for value in operands for one in leaves(value)):
            if one is None:
                return None
            arrays.append(one)
        found = exact(made, [one.exact for one in arrays], self.devices)
        if found is not None:
            return DeviceSharding(found.labels, exact=found)
        who = _refined(self.alike, *(one.who for one in arrays))
        loose = any(one.loose for one in arrays)
        if made.shape.startswith("("):
            one = DeviceSharding(who, loose=loose)
            return [one for _ in elements_of(made.shape)]
        shapes = [self.hlo.shape_of(name) for name in made.operands]
        if len(shapes) != len(arrays):  # one of them is a tuple
            return DeviceSharding(who, loose=loose)
        if made.opcode == "slice" and arrays[0].parts:
            who = _refined(self.alike, *_cut(made, arrays[0].parts)) or who
        parts = _parts(made, shapes, arrays)
        where = _axes.where(made, shapes, arrays)
        return DeviceSharding(who, where, loose=loose, parts=parts)

    def _loop(self, made: Instruction, carry: Value) -> Value:
        for _ in range(_STEPS):
            chosen = self._computation(self.hlo.condition(made), [carry])
            with_choice = self._chosen(chosen)
            self._control.append(with_choice)
            result = self._computation(made.called[0], [carry])
            self._control.pop()
            new = _merged(carry, _under(result, chosen))
            if new == carry:
                return carry
            carry = new
        return None

    def _conditional(self, made: Instruction, operands: Sequence[Value]) -> Value:
        chosen = operands[0]
        self._control.append(self._chosen(chosen))
        pairs = zip(made.called, operands[1:], strict=False)
        results = [self._computation(name, [value]) for name, value in pairs]
        self._control.pop()
        merged = results[0]
        for other in results[1:]:
            merged = _merged(merged, other)
        return _under(merged, chosen)

    def _chosen(self, by: Value) -> Labels:
        """Which devices take the same way, where it is known that they differ."""
        outer = self._control[-1]
        if not isinstance(by, DeviceSharding) or by.loose:
            return outer
        return _refined(outer, by.who)

    def _join(self, made: Instruction, kind: str, operands: Sequence[Value]) -> Value:
        groups = groups_of(made.attributes, self.devices)
        arrays = [one for value in operands for one in leaves(value)]
        if groups is None:
            return [None] * len(arrays) if len(arrays) > 1 else None
        for i, operand in enumerate(arrays):
            self.joins[made.name, i] = Join(made, operand, groups, self._control[-1])
        results = [self._joined(made, kind, one, groups) for one in arrays]
        return results if len(results) > 1 else results[0]

    def _permuted(self, made: Instruction, operand: Value) -> Value:
        if isinstance(operand, list):
            return [self._permuted(made, one) for one in operand]
        if operand is None:
            return None
        sources = sources_of(made.attributes)
        moved = lambda labels: _moved(labels, sources)
        where = tuple(axis and moved(axis) for axis in operand.where)
        return DeviceSharding(moved(operand.who), where, loose=True)

    def _joined(self, made, kind: str, operand: DeviceSharding | None, groups) -> Value:
        split = kind in ("reduce-scatter", "all-to-all")
        if operand is None:
            whole = len(groups) == 1 and len(groups[0]) == self.devices and not split
            return DeviceSharding(self.alike) if whole else None
        who = _of_groups(operand.who, groups, split)
        if kind != "all-reduce":
            return DeviceSharding(who, loose=operand.loose)
        parts = tuple(
            part._replace(who=_of_groups(part.who, groups, split))
            for part in operand.parts
        )
        return DeviceSharding(who, operand.where, loose=operand.loose, parts=parts)


def leaves(value: Value) -> Iterator[DeviceSharding | None]:
    """The shardings of the arrays of a value."""
    if isinstance(value, list):
        for one in value:
            yield from leaves(one)
    else:
        yield value


def differ(labels: Labels, group: Sequence[int]) -> bool:
    """Whether devices of a group have different labels."""
    return len({labels[device] for device in group}) > 1


def _parts(
    made: Instruction, shapes: Sequence[str], arrays: Sequence[DeviceSharding]
) -> tuple[ShardedPart, ...]:
    """Of what was put side by side, or is passed on as it was."""
    if made.opcode in ("copy", "convert") and len(arrays) == 1:
        return arrays[0].parts
    if made.opcode != "concatenate":
        return ()
    (axis,) = made.listed("dimensions")
    found, start = [], 0
    for shape, one in zip(shapes, arrays, strict=True):
        stop = start + arrays_of(shape)[0].sizes[axis]
        found.append(ShardedPart(axis, start, stop, one.who))
        start = stop
    return tuple(found)


def _cut(made: Instruction, parts: Sequence[ShardedPart]) -> list[Labels]:
    """The labels of the parts that a slice takes from."""
    limits = _axes.limits(made)
    inside = lambda part: (
        limits[part.axis][0] < part.stop and part.start < limits[part.axis][1]
    )
    return [part.who for part in parts if inside(part)]


@lru_cache(maxsize=8192)
def _refined(*labellings: Labels) -> Labels:
    """Devices are alike where they are alike in all."""
    first, *rest = dict.fromkeys(labellings)
    return labels_of(list(zip(first, *rest, strict=True))) if rest else first


@lru_cache(maxsize=8192)
def _of_groups(who: Labels, groups: tuple[tuple[int, ...], ...], split: bool) -> Labels:
    """What a collective makes of a labelling; `split`: each gets a part of its own."""
    keys: list = [("alone", label) for label in who]
    for group in groups:
        members = tuple(who[device] for device in group)
        for place, device in enumerate(group):
            keys[device] = (members, place if split else 0)
    return labels_of(keys)


@lru_cache(maxsize=8192)
def _moved(labels: Labels, sources: tuple[tuple[int, int], ...]) -> Labels:
    """Each device has its source's; one without a source has zeros."""
    keys = [-1] * len(labels)
    for source, target in sources:
        keys[target] = labels[source]
    return labels_of(keys)


def _is_alike(labels: Labels) -> bool:
    return len(set(labels)) == 1


def _hands_on(kind: str) -> bool:
    """Whether an operation gives what it takes."""
    ends = kind.endswith(("-done", "-update"))
    return kind in _SAME or kind == "copy-start" or ends


def _may_send(made: Instruction, operands: Sequence[Value]) -> bool:
    """Whether it is a kernel that may send, and devices give it different values."""
    if made.opcode != "custom-call":
        return False
    arrays = [one for value in operands for one in leaves(value)]
    same = all(one is not None and _is_alike(one.who) for one in arrays)
    return not same and any(name in made.attributes for name in _MAY_SEND)


def _element(value: Value, index: int) -> Value:
    if isinstance(value, list) and index < len(value):
        return value[index]
    return None


def _both(
    a: Value, b: Value, join: Callable[[DeviceSharding, DeviceSharding], DeviceSharding]
) -> Value:
    if isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        return [_both(x, y, join) for x, y in zip(a, b, strict=True)]
    if isinstance(a, DeviceSharding) and isinstance(b, DeviceSharding):
        return join(a, b)
    return None


def _merged(a: Value, b: Value) -> Value:
    """A value that is one of two."""
    return _both(a, b, _one_of)


def _one_of(a: DeviceSharding, b: DeviceSharding) -> DeviceSharding:
    if a == b:
        return a
    who, where = _refined(a.who, b.who), _axes.merged(a, b)
    same = a.exact if a.exact == b.exact else None
    return DeviceSharding(who, where, same, a.loose or b.loose)


def _under(value: Value, chosen: Value) -> Value:
    """A value that devices came to by a choice of their own."""
    if isinstance(value, list):
        return [_under(one, chosen) for one in value]
    if value is None or not isinstance(chosen, DeviceSharding):
        return None
    if _is_alike(chosen.who):
        return value
    loose = value.loose or chosen.loose
    return DeviceSharding(_refined(value.who, chosen.who), value.where, loose=loose)
