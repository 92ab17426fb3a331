"""The options of one substitution, the same for linen and nnx."""

import functools
from dataclasses import dataclass
from typing import Any

from jaxmem.nn._rules import Rule
from jaxmem.nn._substitution_report import Recorder

# Dividing by a smaller gain to recover the normalised input would lose a bf16 output's
# eight bits and more.
NEAR_ZERO = 1e-2

# The rewriter looks into no scope whose name starts with `jaxmem.`.
LEAVE_SCOPE = "jaxmem.leave"


@dataclass(frozen=True)
class Spec:
    """What the caller of `substitute` asked for."""

    rules: tuple[Rule, ...] = ()
    save: str = "output"
    patterns: Any = None
    verbose: bool = False

    def library(self) -> Any:
        """The formulas to look for in the traced function."""
        if self.patterns is not None:
            return self.patterns
        return _library(self.save)

    def recorder(self) -> Recorder:
        return Recorder(self.rules)


@functools.cache
def _library(save: str) -> Any:
    """One library for all models: a pattern remembers how it looks when traced."""
    from jaxmem.rewriting import library

    return library(save=save)
