"""Measuring a step: the bytes it takes on a chip, and what its backward pass keeps.

`compile/` compiles a step for a chip that need not be there, `buffers/` reads from the
compiler's texts what lies in memory when, `time/` what takes how long, and `report/`
shows it. `sweeps/` does it for many sizes of a step.
"""

from jaxmem._bytes import format_bytes as format_bytes
from jaxmem._bytes import parse_bytes as parse_bytes
from jaxmem.chips import Target as Target
from jaxmem.chips import target_mesh as target_mesh
from jaxmem.chips import targets as targets
from jaxmem.memory._batch_search import REFUSED as REFUSED
from jaxmem.memory._batch_search import BatchSearch as BatchSearch
from jaxmem.memory._estimate import begin as begin
from jaxmem.memory._estimate import estimate as estimate
from jaxmem.memory._max_batch import BatchSize as BatchSize
from jaxmem.memory._max_batch import best_batch as best_batch
from jaxmem.memory._max_batch import max_batch as max_batch
from jaxmem.memory._pending import Pending as Pending
from jaxmem.memory._residuals import Residual as Residual
from jaxmem.memory._residuals import Residuals as Residuals
from jaxmem.memory._residuals import residuals as residuals
from jaxmem.memory.compile.answer import CompileError as CompileError
from jaxmem.memory.compile.answer import DoesNotFit as DoesNotFit
from jaxmem.memory.compile.pool import start_worker as start_worker
from jaxmem.memory.report.compare import ReportComparison as ReportComparison
from jaxmem.memory.report.report import MemoryReport as MemoryReport
from jaxmem.memory.report.runtime import RuntimeMemory as RuntimeMemory
from jaxmem.memory.report.runtime import fragmentation as fragmentation
from jaxmem.memory.sweeps import Sweep as Sweep
from jaxmem.memory.sweeps import SweptStep as SweptStep
from jaxmem.memory.sweeps import sweep as sweep
from jaxmem.memory.time.result import OperationTime as OperationTime
from jaxmem.memory.time.result import StepTime as StepTime

__all__ = [
    "CompileError",
    "DoesNotFit",
    "best_batch",
    "estimate",
    "max_batch",
    "residuals",
    "sweep",
    "target_mesh",
    "targets",
]
