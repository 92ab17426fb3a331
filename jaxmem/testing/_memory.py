"""An assertion on the bytes and predicted seconds of a step.

Nothing of jax is imported before it is called: pytest loads the plugin in every run.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jaxmem.memory import MemoryReport


def assert_memory(
    step: Callable,
    *args: Any,
    max_bytes: int | str | None = None,
    max_ms: float | None = None,
    baseline: str | os.PathLike[str] | None = None,
    max_growth: float = 0.01,
    update: bool = False,
    **options: Any,
) -> MemoryReport:
    """Compiles a step, and fails where it takes more than it may.

    Args:
      step: the step, as for `jaxmem.estimate`.
      *args: its positional arguments: arrays or `jax.ShapeDtypeStruct`.
      max_bytes: limit for the peak, in bytes or as text such as "14GiB".
      max_ms: limit for the predicted milliseconds of a step.
      baseline: a file ending in .json with the report of an earlier run; peak and
        predicted time may grow by `max_growth` over it.
      max_growth: as a share: 0.01 is one per cent.
      update: write the baseline instead of comparing with it.
      **options: of `jaxmem.estimate`, such as `target` and `donate_argnums`.

    Returns:
      The `MemoryReport` of the step.

    Raises:
      AssertionError: a limit is exceeded, or there is no baseline. The message compares
        the step with its baseline, by module.
      ValueError: no limit is given; `max_ms` for a chip without predicted seconds; a
        baseline that is no report, or is one for another chip.

    Example::

      jaxmem.testing.assert_memory(
          step, state, batch, donate_argnums=0, max_bytes="2GiB"
      )
    """
    import jaxmem
    from jaxmem._checks import check_bool, check_callable, wrong_type, wrong_value
    from jaxmem.diffing import check_limits, exceeded, saved

    check_callable("step", step)
    check_bool("update", update)
    check_limits(max_bytes, max_ms, max_growth)
    if max_bytes is max_ms is baseline is None:
        raise wrong_type(
            "max_bytes", None, "a limit, where max_ms and baseline are None"
        )
    if baseline is not None and not str(baseline).endswith(".json"):
        raise wrong_value("baseline", baseline, "a file that ends in .json")
    path = None if baseline is None else Path(baseline)
    before = None
    if path is not None and not update:
        if not path.exists():
            raise AssertionError(
                f"there is no baseline {path}: write it with update=True, or by "
                "`pytest --update-memory-baselines`"
            )
        before = saved("baseline", path).found
    report = jaxmem.estimate(step, *args, **options)
    if before is not None and before.target != report.target:
        allowed = f"the report of a step for {report.target}, not for {before.target}"
        raise wrong_value("baseline", str(path), allowed)
    limits = {"max_bytes": max_bytes, "max_ms": max_ms, "max_growth": max_growth}
    found = exceeded(report, before, **limits)
    if found:
        details = report if before is None else before.compare(report)
        raise AssertionError(f"{'; '.join(found)}\n{details}")
    if path is not None and update:
        _write(report, path)
    return report


def _write(report: MemoryReport, path: Path) -> None:
    """Writes a report without what pictures alone are drawn from."""
    import dataclasses

    small: dict[str, Any] = {"timeline": (), "placed": (), "advice": ()}
    if report.time is not None:
        small["time"] = dataclasses.replace(report.time, spans=())
    fields = {f.name: getattr(report, f.name) for f in dataclasses.fields(report)}
    path.parent.mkdir(parents=True, exist_ok=True)
    text = type(report)(**fields | small).to_json(indent=1)
    path.write_text(f"{text}\n", encoding="utf-8")
