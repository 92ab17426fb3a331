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
from jaxmem.optim.ledgers import Ledger as Ledger
from jaxmem.optim.ledgers import LedgerRow as LedgerRow
from jaxmem.optim.ledgers import ledger as ledger
from jaxmem.optim.rows import RowGradients as RowGradients
from jaxmem.optim.rows import RowwiseAdagradState as RowwiseAdagradState
from jaxmem.optim.rows import lazy_adam as lazy_adam
from jaxmem.optim.rows import rowwise as rowwise
from jaxmem.optim.rows import rowwise_adagrad as rowwise_adagrad
from jaxmem.optim.rows import rowwise_sgd as rowwise_sgd
from jaxmem.optim.rows import scale_by_rowwise_adagrad as scale_by_rowwise_adagrad
from jaxmem.optim.rows import value_and_row_grad as value_and_row_grad

__all__ = [
    "FusedAdam",
    "MultiSteps",
    "accumulate_step",
    "adama",
    "apply_step",
    "clip_by_layer_norm",
    "ledger",
    "on_host",
    "scale_by_adama",
    "start_step",
]
