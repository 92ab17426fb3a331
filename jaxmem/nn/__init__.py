"""Flax layers that keep less, and `substitute`, which puts them into a whole model."""

from jaxmem.nn import linen as linen
from jaxmem.nn import nnx as nnx
from jaxmem.nn._merge import merge_norm as merge_norm
from jaxmem.nn._merge import unmerge_norm as unmerge_norm
from jaxmem.nn._remaining import KeptArrays as KeptArrays
from jaxmem.nn._remaining import RemainingArrays as RemainingArrays
from jaxmem.nn._reversible import reversible as reversible
from jaxmem.nn._rules import Rule as Rule
from jaxmem.nn._substitute import report as report
from jaxmem.nn._substitute import substitute as substitute
from jaxmem.nn._substitution_report import Replacement as Replacement
from jaxmem.nn._substitution_report import SubstitutionReport as SubstitutionReport

__all__ = [
    "Rule",
    "linen",
    "merge_norm",
    "nnx",
    "report",
    "reversible",
    "substitute",
    "unmerge_norm",
]
