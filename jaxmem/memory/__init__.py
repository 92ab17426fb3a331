"""Measuring a step: what it takes on a chip, and what its backward pass keeps."""

from jaxmem.memory._bytes import format_bytes as format_bytes
from jaxmem.memory._bytes import parse_bytes as parse_bytes
from jaxmem.memory._estimate import begin as begin
from jaxmem.memory._estimate import estimate as estimate
from jaxmem.memory._max_batch import max_batch as max_batch
from jaxmem.memory._pending import Pending as Pending
from jaxmem.memory._pool import CompileError as CompileError
from jaxmem.memory._pool import DoesNotFit as DoesNotFit
from jaxmem.memory._pool import start_worker as start_worker
from jaxmem.memory._quiet import hush as _hush
from jaxmem.memory._report import MemoryReport as MemoryReport
from jaxmem.memory._residuals import Residual as Residual
from jaxmem.memory._residuals import Residuals as Residuals
from jaxmem.memory._residuals import residuals as residuals
from jaxmem.memory._targets import Target as Target
from jaxmem.memory._targets import target_mesh as target_mesh
from jaxmem.memory._targets import targets as targets

_hush()
