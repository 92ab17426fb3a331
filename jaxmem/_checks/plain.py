"""Dataclasses from the plain data of JSON, every field held to its annotation."""

import dataclasses
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

from jaxmem._checks.messages import wrong_value
from jaxmem._checks.names import check_choice
from jaxmem._checks.numbers import check_bool, check_float, check_int


@dataclass(frozen=True)
class Range:
    """Of an `Annotated` number: what it may be."""

    at_least: float | None = None
    at_most: float | None = None


@dataclass(frozen=True)
class OneOf:
    """Of an `Annotated` text: what it may be."""

    choices: Collection[str]


# A class -> what reads it instead, from its plain data and its name.
Readers = Mapping[type, Callable[[Any, str], Any]]


def from_plain(kind: Any, plain: Any, name: str, readers: Readers | None = None) -> Any:
    """The value of a type that JSON has as `plain`.

    Args:
      kind: a dataclass, or what one annotates its fields with.
      plain: dicts, lists, numbers and texts.
      name: of the value, for messages.
      readers: of classes that are written in a form of their own.

    Raises:
      TypeError, ValueError: a field that is none, is missing, or has a value that is
        not allowed; with the path to it, the value and what is allowed.
    """
    readers = readers or {}
    if kind in readers:
        return readers[kind](plain, name)
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, plain, name, readers)
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin is typing.Annotated:
        return _annotated(inner[0], inner[1], plain, name)
    if origin in (typing.Union, types.UnionType):
        if plain is None and type(None) in inner:
            return None
        (kind,) = (one for one in inner if one is not type(None))
        return from_plain(kind, plain, name, readers)
    if origin is typing.Literal:
        return check_choice(name, plain, inner)
    if origin is tuple:
        return _tuple(inner, plain, name, readers)
    if origin is dict:
        value = lambda k, v: from_plain(inner[1], v, f"{name}[{k!r}]", readers)
        return {k: value(k, v) for k, v in _of(dict, plain, name).items()}
    return _leaf(kind, plain, name)


def _leaf(kind: Any, plain: Any, name: str, **limits: Any) -> Any:
    if kind is float:
        check_float(name, plain, infinite=True, **limits)
        return plain
    if kind is int:
        return check_int(name, plain, **limits)
    return check_bool(name, plain) if kind is bool else _of(kind, plain, name)


def _annotated(kind: Any, allowed: Any, plain: Any, name: str) -> Any:
    if isinstance(allowed, OneOf):
        return check_choice(name, plain, allowed.choices)
    return _leaf(kind, plain, name, **dataclasses.asdict(allowed))


def _dataclass(kind: Any, plain: Any, name: str, readers: Readers) -> Any:
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init}
    given = _of(dict, plain, name)
    if unknown := given.keys() - fields.keys():
        raise wrong_value(name, sorted(unknown), f"no fields of {kind.__name__}")
    for field in fields.values():
        both = field.default, field.default_factory
        needed = all(one is dataclasses.MISSING for one in both)
        if needed and field.name not in given:
            raise wrong_value(name, sorted(given), f"{field.name!r} is missing")
    read = lambda k, v: from_plain(hints[k], v, f"{name}.{k}", readers)
    return kind(**{k: read(k, v) for k, v in given.items()})


def _tuple(inner: Any, plain: Any, name: str, readers: Readers) -> tuple[Any, ...]:
    rows = plain if isinstance(plain, tuple) else _of(list, plain, name)
    if inner and inner[-1] is not Ellipsis and len(rows) != len(inner):
        raise wrong_value(name, plain, f"{len(inner)} values")
    kinds = [inner[0]] * len(rows) if inner[-1] is Ellipsis else inner
    return tuple(
        from_plain(kind, row, f"{name}[{i}]", readers)
        for i, (kind, row) in enumerate(zip(kinds, rows, strict=True))
    )


def _of(kind: Any, plain: Any, name: str) -> Any:
    if not isinstance(plain, kind):
        raise wrong_value(name, plain, f"of JSON's type for {kind.__name__}")
    return plain
