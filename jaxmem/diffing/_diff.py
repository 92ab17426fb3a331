"""What changed between two steps, two commits, or two versions of jax."""

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxmem._checks import check_float, check_text, wrong_type, wrong_value
from jaxmem.chips import get_target
from jaxmem.diffing._checkout import checkout
from jaxmem.diffing._interpreter import Interpreter
from jaxmem.diffing._regression import write_reduced
from jaxmem.diffing._sides import SavedReport, Side, StepElsewhere, step_here
from jaxmem.memory import MemoryReport, ReportComparison


def diff(
    a: Any,
    b: Any = None,
    *,
    target: str | None = None,
    commit_a: str | None = None,
    commit_b: str | None = None,
    python_a: str | None = None,
    python_b: str | None = None,
    reduce: str | os.PathLike[str] | None = None,
    reduce_seconds: float = 600.0,
    timeout: float = 600.0,
) -> ReportComparison:
    """Compiles two steps and tells what changed, in bytes and predicted seconds.

    Each of `a` and `b` is a `MemoryReport`, the path of one that was saved as JSON, a
    tuple `(step, args)` or `(step, args, options)` with options of `jaxmem.estimate`,
    or a text `"MODULE:FUNCTION"` that names a function which returns such a tuple. A
    text is run in a process of its own, with the current folder first on its path.

    Args:
      a: the step before the change.
      b: the step after it; by default the same as `a`, for two commits or interpreters.
      target: a name of `jaxmem.targets()`; by default that of the step's own options,
        of a saved `a`, or "cpu".
      commit_a: the commit of the git repository in the current folder that `a` is
        taken from; it is checked out in a temporary folder.
      commit_b: the same for `b`.
      python_a: a Python executable that has jaxmem installed, to trace and compile `a`
        with its version of jax.
      python_b: the same for `b`.
      reduce: a file ending in .py, for the smallest program that still shows at least
        half of the growth of temporaries, as plain JAX that prints its bytes on the
        device it runs on. What the two steps have in common is left out of both;
        inputs of what is left become arguments.
      reduce_seconds: after these the smallest program so far is taken.
      timeout: seconds that a compile may take.

    Returns:
      A `ReportComparison`: totals, bytes and predicted seconds by module, what appeared
      at the peak and what is gone, by module and operation, and the instructions of the
      compiled module whose number changed.

    Raises:
      ValueError: a commit, an interpreter, a file or a name that does not exist; with
        `reduce`, temporaries that do not grow, or an operation that cannot be written
        as plain JAX.
      TypeError: `a` or `b` is none of these.
      RuntimeError: a process could not import, trace or compile its step.

    Example::

      plain = step, (state, batch), {"donate_argnums": 0}
      remat = jax.checkpoint(step), (state, batch), {"donate_argnums": 0}
      print(jaxmem.diff(plain, remat, target="cpu"))
    """
    if target is not None:
        get_target(target, check=False)
    options = {"timeout": check_float("timeout", timeout, above=0)}
    check_float("reduce_seconds", reduce_seconds, above=0)
    if reduce is not None and not str(reduce).endswith(".py"):
        raise wrong_value("reduce", reduce, "a file that ends in .py")
    places = (("a", commit_a, python_a), ("b", commit_b, python_b))
    if b is None and all(commit is python is None for _, commit, python in places):
        raise wrong_type(
            "b", b, "a second step, where no commit and no python is given"
        )
    b = a if b is None else b
    with _side(a, *places[0], options | _chip(target)) as before:
        saved = before.found if isinstance(before, SavedReport) else None
        target = saved.target if saved is not None and target is None else target
        with _side(b, *places[1], options | _chip(target)) as after:
            same = a is b or (isinstance(a, str) and a == b)
            same = same and commit_a == commit_b
            return compare_sides(before, after, same, reduce, reduce_seconds)


def compare_sides(
    before: Side,
    after: Side,
    same: bool,
    reduce: str | os.PathLike[str] | None = None,
    reduce_seconds: float = 600.0,
) -> ReportComparison:
    """The comparison of two sides, which are `same` if the compilers alone differ."""
    begun = before.report(), after.report()
    reports = [report() for report in begun]
    found = reports[0].compare(reports[1])
    versions = before.version(), after.version()
    notes = []
    if len({*versions, ""}) > 2:
        notes.append(f"before: jax {versions[0]}; after: jax {versions[1]}")
    if reduce is not None:
        notes.append(write_reduced(before, after, same, Path(reduce), reduce_seconds))
    return replace(found, notes=tuple(notes))


@contextmanager
def _side(
    given: Any, name: str, commit: str | None, python: str | None, options: dict
) -> Iterator[Side]:
    if isinstance(given, str) and not given.endswith(".json"):
        if ":" not in given:
            allowed = "'MODULE:FUNCTION', or the path of a report, ending in .json"
            raise wrong_value(name, given, allowed)
        with elsewhere(name, given, commit, python, options) as side:
            yield side
        return
    for kind, value in (("commit", commit), ("python", python)):
        if value is not None:
            allowed = f"None where {name} is not a text 'MODULE:FUNCTION'"
            raise wrong_value(f"{kind}_{name}", value, allowed)
    if isinstance(given, MemoryReport):
        yield SavedReport(given)
    elif isinstance(given, str | os.PathLike):
        yield saved(name, Path(given))
    else:
        yield step_here(name, given, options)


@contextmanager
def elsewhere(
    name: str, spec: str, commit: str | None, python: str | None, options: dict
) -> Iterator[StepElsewhere]:
    """A step in a process of its own: of a commit, with a Python."""
    for kind, value in (("commit", commit), ("python", python)):
        if value is not None:
            check_text(f"{kind}_{name}", value)
    tree = checkout(f"commit_{name}", commit) if commit is not None else None
    with tree if tree is not None else _here() as (folder, root):
        label = name if python is None else f"python_{name}"
        interpreter = Interpreter(label, python or sys.executable, folder)
        try:
            interpreter.ask("load", spec=spec, root=str(root or ""), **options)()
            yield StepElsewhere(interpreter)
        finally:
            interpreter.close()


@contextmanager
def _here() -> Iterator[tuple[Path, None]]:
    yield Path.cwd(), None


def saved(name: str, path: Path) -> SavedReport:
    """The report in a file."""
    try:
        return SavedReport(MemoryReport.from_json(path.read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        allowed = f"the path of a report that was saved as JSON ({error})"
        raise wrong_value(name, str(path), allowed) from error


def _chip(target: str | None) -> dict[str, str]:
    return {} if target is None else {"target": target}
