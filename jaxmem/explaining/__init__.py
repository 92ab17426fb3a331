"""Explaining errors of memory that has run out: what is large, why, what to write.

`_text.py` makes one text of an error or a log, `_forms.py` finds which error it is, and
a file for each device (`_gpu.py`, `_tpu.py`, `_host.py`) reads its figures.
`_diagnosis.py` tells the cause from them, `_advice.py` what to write.
"""

from jaxmem.explaining._explain import explain as explain
from jaxmem.explaining._explain import has_error as has_error
from jaxmem.explaining._explained import explained as explained
from jaxmem.explaining._explanation import Explanation as Explanation
from jaxmem.explaining._explanation import LineToWrite as LineToWrite
from jaxmem.explaining._facts import LargeBuffer as LargeBuffer

__all__ = [
    "explain",
    "explained",
]
