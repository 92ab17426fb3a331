"""A Python of the user's in a process of its own, which is asked about steps.

A request is a line of JSON, and so is an answer; the command line has the worker.
"""

import json
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

_WORKER = "jaxmem.cli.diff_worker"  # above this package: it reads MODULE:FUNCTION


class Interpreter:
    """A process; it must be closed."""

    def __init__(self, name: str, python: str, folder: Path):
        self._name, self._python = name, python
        self._said = tempfile.TemporaryFile("w+")  # its warnings, shown if it ends
        try:
            # -P: what is in the folder does not hide what is installed
            self._process = subprocess.Popen(
                [python, "-P", "-m", _WORKER],
                cwd=folder,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._said,
                text=True,
            )
        except OSError as error:
            self._said.close()
            raise ValueError(
                f"{name}={python!r}: a Python executable that has jaxmem ({error})"
            ) from None

    def ask(self, do: str, **request: Any) -> Callable[[], Any]:
        """Sends a request; call the result, in the order of requests, for the answer.

        The call raises a ValueError where what was asked for does not exist, and a
        RuntimeError where it failed, or the process ended.
        """
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(f"{json.dumps({'do': do, **request})}\n")
            self._process.stdin.flush()
        except BrokenPipeError:  # which its answer tells
            pass
        return self._answer

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._said.seek(0)
            said = self._said.read().strip().rpartition("\n")[2]
            raise RuntimeError(f"{self._name}: {self._python} has ended: {said}")
        answer = json.loads(line)
        if "wrong" in answer:
            raise ValueError(f"{self._name}: {answer['wrong']}")
        if "failed" in answer:
            raise RuntimeError(f"{self._name}: {answer['failed']}")
        return answer["answer"]

    def close(self) -> None:
        """Ends the process."""
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            self._process.stdin.close()
            self._process.wait(10)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._said.close()
