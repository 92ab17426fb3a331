"""Linting a training step: what it does to itself, and what that costs."""

from jaxmem.linting._lint import lint as lint
from jaxmem.linting._report import Finding as Finding
from jaxmem.linting._report import LintReport as LintReport

__all__ = [
    "lint",
]
