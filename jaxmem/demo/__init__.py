"""The demonstration behind `jaxmem demo`: a small GPT trained plain and substituted.

The model is written the way users write theirs, with Flax modules and bare calls of
`nn.gelu`, on the sources of the Python standard library as bytes. Both runs see the
same seed and the same batches, so that their losses can be laid over each other.
"""

from jaxmem.demo._compare import Comparison as Comparison
from jaxmem.demo._compare import compare as compare
from jaxmem.demo._data import Text as Text
from jaxmem.demo._data import batches as batches
from jaxmem.demo._data import standard_library as standard_library
from jaxmem.demo._figures import draw as draw
from jaxmem.demo._run import run as run
from jaxmem.demo._settings import Settings as Settings
from jaxmem.demo._table import table as table
