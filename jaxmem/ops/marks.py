"""Calls whose best form is known once the whole function around them is traced.

A marked call is a `jax.jit` with a name of its own, which is right as it stands;
`jaxmem.rewriting` replaces it. A jaxpr holds names only: so its record is found by
name.
"""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import jax

Record = TypeVar("Record")


@dataclass(frozen=True, eq=False)
class UnrolledOnTpu:
    """Another form of a call, for a TPU, where the call is in no loop.

    There the compiler makes an output once more in the products that read it, so that
    it need not be kept.
    """

    form: Callable


# Weak: a record lives as long as the function that was traced with it. Where that is
# gone, its name in a jaxpr that somebody kept stands for the call as it is.
_RECORDS: weakref.WeakValueDictionary[str, Any] = weakref.WeakValueDictionary()


def marked(name: str, fn: Callable, record: Any) -> Any:
    """`fn` under `jax.jit`, by a name under which `record_of` finds the record."""
    fn.__name__ = fn.__qualname__ = name
    vars(fn)["jaxmem_record"] = record  # keeps the record alive
    _RECORDS[name] = record
    return jax.jit(fn)


def record_of(eqn: Any, kind: type[Record]) -> Record | None:
    """The record, of this class, that the call in an equation was marked with."""
    name = eqn.params.get("name")
    record = _RECORDS.get(name) if isinstance(name, str) else None
    return record if isinstance(record, kind) else None
