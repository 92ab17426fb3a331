"""Optax gradient transformations that need less memory.

`adama` folds each micro-batch's gradient into Adam's moments, so that no gradient is
accumulated. `MultiSteps` accumulates for any optimizer, in the moments where it holds
an AdamA. `accumulate_step` and `apply_step` are the two halves of a mini-batch for a
scan over micro-batches; `start_step` comes before them if each device of a `shard_map`
has micro-batches of its own. `clip_by_layer_norm` clips without waiting for the
gradient of the whole model. `jaxmem.optim.accumulation` has the interface for other
optimizers that accumulate gradients in their own state.
"""

from jaxmem.optim._adama import adama as adama
from jaxmem.optim._adama import scale_by_adama as scale_by_adama
from jaxmem.optim._adama_rule import AdamAState as AdamAState
from jaxmem.optim._clip import clip_by_layer_norm as clip_by_layer_norm
from jaxmem.optim._fused_adam import FusedAdam as FusedAdam
from jaxmem.optim._multi_steps import MultiSteps as MultiSteps
from jaxmem.optim._on_host import on_host as on_host
from jaxmem.optim.accumulation import accumulate_step as accumulate_step
from jaxmem.optim.accumulation import accumulates as accumulates
from jaxmem.optim.accumulation import apply_step as apply_step
from jaxmem.optim.accumulation import start_step as start_step
from jaxmem.optim.factored import AdamMiniState as AdamMiniState
from jaxmem.optim.factored import CameState as CameState
from jaxmem.optim.factored import FactoredMoment as FactoredMoment
from jaxmem.optim.factored import FactoredRmsState as FactoredRmsState
from jaxmem.optim.factored import Sm3State as Sm3State
from jaxmem.optim.factored import adafactor as adafactor
from jaxmem.optim.factored import adalomo as adalomo
from jaxmem.optim.factored import adam_mini as adam_mini
from jaxmem.optim.factored import came as came
from jaxmem.optim.factored import lomo as lomo
from jaxmem.optim.factored import scale_by_adam_mini as scale_by_adam_mini
from jaxmem.optim.factored import scale_by_came as scale_by_came
from jaxmem.optim.factored import scale_by_factored_rms as scale_by_factored_rms
from jaxmem.optim.factored import scale_by_sm3 as scale_by_sm3
from jaxmem.optim.factored import sm3 as sm3
from jaxmem.optim.ledgers import Ledger as Ledger
from jaxmem.optim.ledgers import LedgerRow as LedgerRow
from jaxmem.optim.ledgers import ledger as ledger

__all__ = [
    "FusedAdam",
    "MultiSteps",
    "accumulate_step",
    "adafactor",
    "adalomo",
    "adam_mini",
    "adama",
    "apply_step",
    "came",
    "clip_by_layer_norm",
    "ledger",
    "lomo",
    "on_host",
    "scale_by_adam_mini",
    "scale_by_adama",
    "scale_by_came",
    "scale_by_factored_rms",
    "scale_by_sm3",
    "sm3",
    "start_step",
]
