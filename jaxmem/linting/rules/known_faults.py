"""Faults of the compiler and of libraries that a step meets, by the table of them."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from jaxmem import faults
from jaxmem.auditing import audit_texts
from jaxmem.chips import get_target
from jaxmem.faults import FAULTS, KnownFault, TracedProgram, versions
from jaxmem.linting._report import Severity
from jaxmem.linting._subject import Finding, Subject, levels, place
from jaxmem.memory.buffers import parse_hlo

_CHECK = "known fault"
_SEVERITY: dict[str, Severity] = {"slow": "warning", "memory": "warning"}
_NAMES = {"cpu": "a CPU", "cuda": "a GPU", "tpu": "a TPU"}


def known_faults(subject: Subject) -> Iterator[Finding]:
    """Finds the rows of the table that this version of jax has, on these platforms."""
    affected = list(_standing("affected", subject))
    if subject.compiled is not None:
        yield from _in_module(subject)
        affected = [f for f in affected if f.in_module is None]
    found = list(_in_program(subject, affected))
    yield from found
    ended = faults.of_error(subject.error) if subject.error else None
    if ended is not None and not any(ended.address in f.what for f in found):
        yield _finding(ended, "", f"the compiler ends in an error: {ended.what}")


def not_looked_at(subject: Subject) -> Iterator[str]:
    """A sentence for what the table does not know of this version of jax."""
    version = versions.installed()
    written = versions.written(version)
    if version > versions.newest(FAULTS):
        yield f"known faults: jax {written} was not checked yet"
        return
    unknown = list(_standing("not checked yet", subject))
    for one in dict.fromkeys(f.fault for f in _findings(subject, unknown)):
        yield (
            f"known faults: {one.what} ({one.report}): jax {written} was not checked "
            "yet"
        )


def is_known(error: str) -> bool:
    """Whether a row of the table ends in this error."""
    return faults.of_error(error) is not None


@contextlib.contextmanager
def telling() -> Iterator[None]:
    """Has an error that a row of the table ends in say so."""
    try:
        yield
    except Exception as error:
        if fault := faults.of_error(str(error)):
            error.add_note(f"known fault: {fault.address}: {_remedy(fault)}")
        raise


def _platforms(subject: Subject) -> tuple[str, ...]:
    if subject.target is None:
        return tuple(_NAMES)
    return (get_target(subject.target, check=False).platform,)


def _standing(standing: str, subject: Subject) -> Iterator[KnownFault]:
    """The rows of which the table says this, on a platform that is meant."""
    for fault in FAULTS:
        told = (versions.standing(fault, p) for p in _platforms(subject))
        if standing in told:
            yield fault


def _findings(subject: Subject, rows: Iterable[KnownFault]) -> Iterator[Any]:
    donated = (i for i, leaf in enumerate(subject.call.leaves) if leaf.donated)
    program = TracedProgram(
        subject.live,
        frozenset(donated),
        faults.devices_of(subject.call.shardings),
        faults.processes_are_joined(),
    )
    return faults.findings_in_program(program, rows)


def _in_program(subject: Subject, rows: Iterable[KnownFault]) -> Iterator[Finding]:
    found = list(_findings(subject, rows))
    if not found:
        return
    of = {id(e): level for level in levels(subject.live) for e in level.graph.eqns}
    for one in found:
        on = ""
        if subject.target is None:
            on = " or ".join(_NAMES[p] for p in one.fault.platforms)
            on = f"on {on}: "
        where = place(of[id(one.where)], one.where)
        yield _finding(one.fault, on, one.what, **where)


def _in_module(subject: Subject) -> Iterator[Finding]:
    """What `audit` finds, of faults that are in the table."""
    compiled = subject.compiled
    assert compiled is not None
    rows = {f.address: f for f in _standing("affected", subject)}
    if not compiled.assignment:  # of some platforms there is none
        hlo = parse_hlo(compiled.hlo)
        for one in faults.findings_in_module(hlo, rows.values()):
            made = hlo.instruction(one.where)
            where = hlo.source(made) if made is not None else ""
            yield _finding(one.fault, "", one.what, where)
        return
    for one in audit_texts(compiled.hlo, compiled.assignment):
        if one.report in rows:
            yield _finding(rows[one.report], "", one.what, one.where, one.operation)


def _finding(
    fault: KnownFault, on: str, what: str, where: str = "", path: str = ""
) -> Finding:
    return Finding(
        check=_CHECK,
        severity=_SEVERITY.get(fault.consequence, "error"),
        what=f"{on}{what} ({fault.consequence}: {fault.address})",
        where=where,
        path=path,
        remedy=_remedy(fault),
    )


def _remedy(fault: KnownFault) -> str:
    if not fault.options:
        return fault.way_round
    return f"{fault.way_round}, or compile with compiler_options={dict(fault.options)}"
