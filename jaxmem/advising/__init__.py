"""Which of the library's measures make a step fit, compiled one after another."""

from jaxmem.advising._advice import Advice, CompiledMeasure
from jaxmem.advising._advise import advise

__all__ = ["Advice", "CompiledMeasure", "advise"]
