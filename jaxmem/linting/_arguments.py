"""Findings about arguments of the step."""

from collections.abc import Iterable, Iterator
from typing import Any

from jaxmem.linting._subject import LEAST, Finding, Subject
from jaxmem.memory.report import whole_bytes

_SHOWN = 2


def about_arguments(
    subject: Subject, leaves: Iterable[int], least: int = LEAST, **fields: Any
) -> Iterator[Finding]:
    """One finding about several arguments, which names the largest.

    Args:
      subject: the step.
      leaves: numbers of the arguments.
      least: bytes from which an argument counts.
      **fields: the other fields of the finding.
    """
    sizes = {i: whole_bytes(subject.call, i) for i in leaves}
    large = sorted((i for i in sizes if sizes[i] >= least), key=lambda i: -sizes[i])
    if large:
        names = [subject.call.leaves[i].name for i in large]
        rest = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
        total = sum(sizes[i] for i in large)
        yield Finding(where=", ".join(names[:_SHOWN]) + rest, bytes=total, **fields)
