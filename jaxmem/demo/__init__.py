"""The demonstration behind `jaxmem demo`: a small GPT trained plain and substituted.

The model is written the way users write theirs, with Flax modules and bare calls of
`nn.gelu`, on the sources of the Python standard library as bytes. Both runs have the
same seed and the same batches, so that their losses can be compared step by step.
"""

from jaxmem.demo.comparison import Comparison as Comparison
from jaxmem.demo.comparison import compare as compare
from jaxmem.demo.data import Text as Text
from jaxmem.demo.data import batches as batches
from jaxmem.demo.data import standard_library as standard_library
from jaxmem.demo.figures import draw as draw
from jaxmem.demo.report import run as run
from jaxmem.demo.report import table as table
from jaxmem.demo.settings import Settings as Settings

__all__ = [
    "batches",
    "standard_library",
]
