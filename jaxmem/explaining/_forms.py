"""Which of the known errors a text has."""

import functools
import re
from collections.abc import Callable

from jaxmem.explaining import _gpu, _host, _tpu
from jaxmem.explaining._facts import Facts
from jaxmem.explaining._text import without_prefixes

Reader = Callable[[str, re.Match[str]], Facts]
_FORMS: tuple[tuple[str, Reader], ...] = (
    (_tpu.IN_HBM, _tpu.compiled),
    (_tpu.IN_KERNEL, _tpu.kernel),
    (_tpu.WHEN_RUN, _tpu.allocated),
    (_gpu.WHEN_RUN, _gpu.allocated),
    (_gpu.IN_LIBRARY, _gpu.library),
    (_host.ON_CPU, _host.on_cpu),
    (_host.ON_HOST, _host.on_host),
)
LOOKED_FOR = (
    "RESOURCE_EXHAUSTED with what was to be allocated, the dump of a GPU's allocator, "
    "CUDA_ERROR_OUT_OF_MEMORY, a TPU's 'Ran out of memory' or 'Attempting to "
    "allocate', libraries without room, and a host whose process was killed"
)


@functools.lru_cache(maxsize=1)  # asked whether, and then what
def facts_of(text: str) -> Facts | None:
    """The figures of the error that comes last; None where there is no such error."""
    plain = without_prefixes(text)
    found = [(m.end(), read, m) for form, read in _FORMS for m in _last(form, plain)]
    if not found:
        return None
    _, read, match = max(found, key=lambda each: each[0])
    return read(plain, match)


def _last(form: str, text: str) -> list[re.Match[str]]:
    return [*re.finditer(form, text, re.M)][-1:]
