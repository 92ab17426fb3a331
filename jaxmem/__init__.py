"""Training in JAX that fits in less memory.

Measure a step on the chip it will run on (`estimate`, `residuals`, `max_batch`),
replace what keeps too much (`substitute`, `ops`, `nn`), and fold the optimizer into the
backward pass (`schedule`, `microbatch`, `adama`). Names are loaded when they are first
used, so that `import jaxmem` costs next to nothing.
"""

import importlib
from typing import TYPE_CHECKING

from jaxmem import _adviser

if TYPE_CHECKING:
    from jaxmem import accumulate as accumulate
    from jaxmem import advising as advising
    from jaxmem import auditing as auditing
    from jaxmem import checking as checking
    from jaxmem import demo as demo
    from jaxmem import diffing as diffing
    from jaxmem import explaining as explaining
    from jaxmem import freezing as freezing
    from jaxmem import linting as linting
    from jaxmem import memory as memory
    from jaxmem import monitoring as monitoring
    from jaxmem import nn as nn
    from jaxmem import ops as ops
    from jaxmem import optim as optim
    from jaxmem import planning as planning
    from jaxmem import rewriting as rewriting
    from jaxmem import scheduling as scheduling
    from jaxmem import testing as testing
    from jaxmem.accumulate import microbatch as microbatch
    from jaxmem.advising import advise as advise
    from jaxmem.auditing import audit as audit
    from jaxmem.checking import check as check
    from jaxmem.diffing import diff as diff
    from jaxmem.explaining import explain as explain
    from jaxmem.explaining import explained as explained
    from jaxmem.freezing import trainable as trainable
    from jaxmem.freezing import value_and_grad as value_and_grad
    from jaxmem.linting import lint as lint
    from jaxmem.memory import best_batch as best_batch
    from jaxmem.memory import estimate as estimate
    from jaxmem.memory import max_batch as max_batch
    from jaxmem.memory import residuals as residuals
    from jaxmem.memory import sweep as sweep
    from jaxmem.memory import target_mesh as target_mesh
    from jaxmem.memory import targets as targets
    from jaxmem.monitoring import live_arrays as live_arrays
    from jaxmem.monitoring import monitor as monitor
    from jaxmem.nn import reversible as reversible
    from jaxmem.nn import substitute as substitute
    from jaxmem.optim import adama as adama
    from jaxmem.optim import ledger as ledger
    from jaxmem.optim import scale_by_adama as scale_by_adama
    from jaxmem.scheduling import remat_policy as remat_policy
    from jaxmem.scheduling import schedule as schedule

    __version__: str

_HOME = {
    "adama": "jaxmem.optim",
    "advise": "jaxmem.advising",
    "audit": "jaxmem.auditing",
    "best_batch": "jaxmem.memory",
    "check": "jaxmem.checking",
    "diff": "jaxmem.diffing",
    "estimate": "jaxmem.memory",
    "explain": "jaxmem.explaining",
    "explained": "jaxmem.explaining",
    "ledger": "jaxmem.optim",
    "lint": "jaxmem.linting",
    "live_arrays": "jaxmem.monitoring",
    "max_batch": "jaxmem.memory",
    "microbatch": "jaxmem.accumulate",
    "monitor": "jaxmem.monitoring",
    "remat_policy": "jaxmem.scheduling",
    "residuals": "jaxmem.memory",
    "reversible": "jaxmem.nn",
    "scale_by_adama": "jaxmem.optim",
    "schedule": "jaxmem.scheduling",
    "substitute": "jaxmem.nn",
    "sweep": "jaxmem.memory",
    "target_mesh": "jaxmem.memory",
    "targets": "jaxmem.memory",
    "trainable": "jaxmem.freezing",
    "value_and_grad": "jaxmem.freezing",
}
_SUBPACKAGES = (
    "accumulate",
    "advising",
    "auditing",
    "checking",
    "demo",
    "diffing",
    "explaining",
    "freezing",
    "linting",
    "memory",
    "monitoring",
    "nn",
    "ops",
    "optim",
    "planning",
    "rewriting",
    "scheduling",
    "testing",
)

__all__ = [*_HOME, *_SUBPACKAGES]


def _advice_on(step) -> tuple[str, ...]:
    return importlib.import_module("jaxmem.advising").advice_on(step)


_adviser.adviser = _advice_on


def __getattr__(name: str):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"jaxmem.{name}")
    if name in _HOME:
        return getattr(importlib.import_module(_HOME[name]), name)
    if name == "__version__":  # reading what is installed takes more than all of this
        return importlib.import_module("importlib.metadata").version("jaxmem")
    raise AttributeError(f"module 'jaxmem' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
