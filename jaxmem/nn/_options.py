"""The options of one substitution, the same for linen and nnx."""

import fnmatch
import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmem._checks import wrong_value
from jaxmem.nn._norm import SAVES
from jaxmem.nn._rules import Rule
from jaxmem.nn._substitution_report import Recorder
from jaxmem.ops.codes import Quantization, as_quantization

Save = str | Quantization


@dataclass(frozen=True)
class Storage:
    """`word` for all modules but those that a pattern names; the first match counts."""

    word: str
    patterns: tuple[tuple[str, Save], ...] = ()

    def at(self, path: str) -> tuple[Save, str | None]:
        """What the module at `path` keeps, and the pattern that says so."""
        for pattern, save in self.patterns:
            if fnmatch.fnmatchcase(path, pattern):
                return save, pattern
        return self.word, None


def read_storage(save: Any) -> Storage:
    """The `save` argument of `substitute`: a word, bits, or a dict by path pattern."""
    if isinstance(save, Mapping):
        items = tuple((_pattern(p), read_save(s)) for p, s in save.items())
        return Storage("output", items)
    value = read_save(save)
    if isinstance(value, str):
        return Storage(value)
    return Storage("output", (("*", value),))


def read_save(save: Any) -> Save:
    """A word or bits, checked."""
    how = as_quantization(save)
    if how is None and not (isinstance(save, str) and save in SAVES):
        allowed = f"one of {SAVES}, bits a value (1 to 8) or a Quantization"
        raise wrong_value("save", save, allowed)
    return save if how is None else how


def _pattern(pattern: Any) -> str:
    if not isinstance(pattern, str):
        raise TypeError(f"save: {pattern!r} is no pattern of module paths, as 'mlp/*'")
    return pattern


# Dividing by a smaller gain to recover the normalised input would lose a bf16 output's
# eight bits and more.
NEAR_ZERO = 1e-2


@dataclass(frozen=True)
class SubstitutionOptions:
    """What the caller of `substitute` asked for."""

    rules: tuple[Rule, ...] = ()
    save: Storage = Storage("output")
    activations: str | int | Quantization = "output"
    patterns: Any = None
    verbose: bool = False

    def library(self) -> Any:
        """The formulas to look for in the traced function."""
        if self.patterns is not None:
            return self.patterns
        return _library(self.activations)

    @property
    def codes(self) -> bool:
        """Whether anything is stored as codes."""
        stored = (save for _, save in self.save.patterns)
        return any(isinstance(s, Quantization) for s in (*stored, self.activations))

    def recorder(self) -> Recorder:
        return Recorder(self.rules, tuple(p for p, _ in self.save.patterns))


@functools.cache
def _library(save: str | int | Quantization) -> Any:
    # One library for all models: a pattern remembers how it looks when traced.
    from jaxmem.rewriting import library

    return library(save=save)
