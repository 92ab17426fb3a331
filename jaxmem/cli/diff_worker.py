"""Answers `jaxmem diff` in a Python of the user's, or in a checkout of a commit.

It reads a line of JSON for each request, and writes one with the answer. What the step
itself prints goes to the standard error.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any

import typer

from jaxmem.cli._app import Failed, one_line
from jaxmem.cli._options import named
from jaxmem.diffing import StepHere

_INSTALLED = ("site-packages", "dist-packages")


class _Worker:
    """What it has loaded, and how each request is answered."""

    side: StepHere

    def load(self, spec: str, root: str, **how: Any) -> None:
        flags = {"args_spec": None, "batch": None} | how
        found, args = named(spec, flags.pop("args_spec"), flags.pop("batch"), **flags)
        if root and (outside := _outside(Path(root))):
            raise typer.BadParameter(
                f"{outside} was imported, which is not in the checkout of the commit: "
                "name a .py file, and import from its folder"
            )
        self.side = StepHere(found.fn, args, found.options)

    def report(self) -> dict[str, Any]:
        return json.loads(self.side.report()().to_json())

    def program(self) -> str:
        return self.side.program()

    def temp_bytes(self, text: str) -> int:
        return self.side.temp_bytes(text)()

    def version(self) -> str:
        return self.side.version()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        do = request.pop("do")
        try:
            return {"answer": getattr(self, do)(**request)}
        except typer.BadParameter as error:
            return {"wrong": error.message}
        except Exception as error:
            kind = "" if isinstance(error, Failed) else f"{type(error).__name__}: "
            return {"failed": one_line(f"{kind}{error}")}


def _outside(root: Path) -> str:
    """A module of the user's that was imported from the repository itself."""
    here = Path.cwd().resolve()
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        own = str(getattr(module, "__name__", "")).partition(".")[0]
        if file is None or own in ("jaxmem", "pallas_kernels"):
            continue
        path = Path(file).resolve()
        installed = any(part in path.parts for part in _INSTALLED)
        if path.is_relative_to(root) and not (path.is_relative_to(here) or installed):
            return str(path)
    return ""


def main() -> None:
    """Answers until the standard input is closed."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    worker = _Worker()
    for line in sys.stdin:
        answers.write(f"{json.dumps(worker.answer(json.loads(line)))}\n")
        answers.flush()


if __name__ == "__main__":
    main()
