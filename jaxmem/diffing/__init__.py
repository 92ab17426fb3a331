"""What changed between two steps, and the smallest program that shows it."""

from jaxmem.diffing._diff import compare_sides as compare_sides
from jaxmem.diffing._diff import diff as diff
from jaxmem.diffing._diff import elsewhere as elsewhere
from jaxmem.diffing._diff import saved as saved
from jaxmem.diffing._limits import check_limits as check_limits
from jaxmem.diffing._limits import exceeded as exceeded
from jaxmem.diffing._sides import Side as Side
from jaxmem.diffing._sides import StepHere as StepHere

__all__ = ["diff"]
