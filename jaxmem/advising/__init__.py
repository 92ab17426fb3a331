"""Which of the library's measures make a step fit, compiled one after another."""

from jaxmem.advising._advice import Advice, Rung
from jaxmem.advising._advise import advise
from jaxmem.advising._measures import step_args, step_of

__all__ = ["Advice", "Rung", "advise", "step_args", "step_of"]
