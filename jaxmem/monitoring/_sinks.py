"""Where figures are written: a file, TensorBoard, Weights & Biases, a function."""

import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxmem._checks import wrong_type, wrong_value
from jaxmem.monitoring._statistics import Figures

_ALLOWED = (
    "the path of a .jsonl file, a writer with `add_scalar` or `scalar` (TensorBoard), "
    "a run with `log` (Weights & Biases), a function of (figures, step), or a sequence "
    "of these"
)
_PREFIX = "memory/"  # of tags, which are shown in groups

Sink = Callable[[Figures, int], Any]


class JsonLines:
    """A line of JSON for each step that is recorded; each process has its own file."""

    def __init__(self, path: Path):
        index = jax.process_index() if jax.process_count() > 1 else None
        if index is not None:
            path = path.with_name(f"{path.stem}.{index}{path.suffix}")
        try:
            self._file = path.open("a", encoding="utf-8")
        except OSError as error:
            why = f"a file that can be written ({error.strerror})"
            raise wrong_value("log_to", str(path), why) from error

    def __call__(self, figures: Figures, step: int) -> None:
        about = {"step": step, "time": time.time(), "process": jax.process_index()}
        self._file.write(f"{json.dumps({**about, **figures})}\n")
        self._file.flush()  # what is known when the process is killed

    def close(self) -> None:
        """Closes the file."""
        self._file.close()


def sinks_of(log_to: Any) -> list[Sink]:
    """What writes to each of the places that a user has given."""
    several = isinstance(log_to, Sequence) and not isinstance(log_to, str | bytes)
    return [_sink(each) for each in (log_to if several else [log_to])]


def _sink(log_to: Any) -> Sink:
    if isinstance(log_to, str | os.PathLike):
        return _file(log_to)
    if isinstance(log_to, logging.Logger) or isinstance(log_to, type):
        raise wrong_type("log_to", log_to, _ALLOWED)
    for name in ("add_scalar", "scalar"):
        if callable(write := getattr(log_to, name, None)):
            return _scalars(write)
    if callable(write := getattr(log_to, "log", None)):
        named = lambda figures: {f"{_PREFIX}{k}": v for k, v in figures.items()}
        return lambda figures, step: write(named(figures), step=step)
    if not callable(log_to):
        raise wrong_type("log_to", log_to, _ALLOWED)
    return log_to


def _file(path: str | os.PathLike[str]) -> JsonLines:
    text = os.fspath(path)
    if Path(text).suffix.lower() not in (".jsonl", ".json"):
        raise wrong_value("log_to", text, "a file that ends in .jsonl")
    return JsonLines(Path(text))


def _scalars(write: Callable[..., Any]) -> Sink:
    def log(figures: Figures, step: int) -> None:
        for name, value in figures.items():
            write(f"{_PREFIX}{name}", value, step)

    return log
