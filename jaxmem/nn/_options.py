"""The options of one substitution, the same for linen and nnx."""

import functools
from dataclasses import dataclass
from typing import Any

from jaxmem.nn._rules import Rule
from jaxmem.nn._storage import Storage
from jaxmem.nn._substitution_report import Recorder
from jaxmem.ops.codes import Quantization

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
    """One library for all models: a pattern remembers how it looks when traced."""
    from jaxmem.rewriting import library

    return library(save=save)
