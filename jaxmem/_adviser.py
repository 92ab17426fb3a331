"""Who says what to do about a compiled step: packages above the one that asks.

`jaxmem/__init__.py` sets it, which knows them all.
"""

from collections.abc import Callable
from typing import Any

# of a `jaxmem.memory.report.advice.AdvisedStep`, sentences
adviser: Callable[[Any], tuple[str, ...]] = lambda step: ()
