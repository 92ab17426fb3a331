"""Which of the library's measures make a step fit, compiled one after another."""

from jaxmem.advising._advice import Advice, CompiledMeasure
from jaxmem.advising._advise import advise
from jaxmem.advising.remedies import Remedy as Remedy
from jaxmem.advising.remedies import advice_on as advice_on
from jaxmem.advising.remedies import remedies_for as remedies_for

__all__ = ["Advice", "CompiledMeasure", "advise"]
