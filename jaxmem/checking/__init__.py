"""Checking a step against its reference: both run, every result compared."""

from jaxmem.checking._check import check as check
from jaxmem.checking._check import compared as compared
from jaxmem.checking._compare import StepComparison as StepComparison
from jaxmem.checking._drawn import drawn as drawn
from jaxmem.checking._report import CheckReport as CheckReport
from jaxmem.checking._report import LeafDifference as LeafDifference
from jaxmem.checking._verify import VerifyError as VerifyError
from jaxmem.checking._verify import verify as verify

__all__ = [
    "check",
]
