"""What each module keeps: words, or a few bits a value, by patterns of module paths."""

import fnmatch
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxmem._checks import wrong_value
from jaxmem.nn._norm import SAVES
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
