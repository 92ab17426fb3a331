"""Optax gradient transformations that need less memory.

- Micro-batches: `adama` folds each micro-batch's gradient into Adam's moments, so that
  no gradient is accumulated. `MultiSteps` accumulates for any optimizer, in the moments
  where it holds an AdamA. `accumulate_step` and `apply_step` are the two halves of a
  mini-batch for a scan over micro-batches; `start_step` comes before them if each
  device of a `shard_map` has micro-batches of its own. `jaxmem.optim.accumulation` has
  the interface for other optimizers that accumulate gradients in their own state.
- Low-bit moments: `adam`, `adamw`, `adama`, `lion` with `bits=8` or 4, or with the
  codes that `choose_codes` measures for each leaf. Weights in bfloat16:
  `stochastic_rounding`, `kahan_summation`, `split_master` around any transformation.
- Low-rank moments: `galore`, `apollo`, `apollo_mini`, `fira`.
- Factored moments: `came`, `adafactor`, `adalomo`, `lomo`, `sm3`, `adam_mini`.
- Orthogonalised momentum: `muon`. Preconditioned by matrices: `soap`, `shampoo`. An
  average of the weights in place of a decaying
  rate: `schedule_free`, `schedule_free_adamw`, `schedule_free_eval_params`.
- Tables: `rowwise`, `lazy_adam`, `rowwise_adagrad`, `rowwise_sgd` update the rows that
  a step has read, from the gradient of `value_and_row_grad`.
- `on_host` keeps an optimizer's state in the host's memory, `abstract_state` has its
  shapes. `clip_by_layer_norm` clips without waiting for the gradient of the whole
  model. `ledger` counts bytes.
"""

from jaxmem.optim._abstract_state import abstract_state as abstract_state
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
from jaxmem.optim.averaged import RmsState as RmsState
from jaxmem.optim.averaged import ScheduleFreeState as ScheduleFreeState
from jaxmem.optim.averaged import schedule_free as schedule_free
from jaxmem.optim.averaged import schedule_free_adamw as schedule_free_adamw
from jaxmem.optim.averaged import schedule_free_eval_params as schedule_free_eval_params
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
from jaxmem.optim.low_bit import ChosenCodes as ChosenCodes
from jaxmem.optim.low_bit import LeafCode as LeafCode
from jaxmem.optim.low_bit import LionState as LionState
from jaxmem.optim.low_bit import LowBit as LowBit
from jaxmem.optim.low_bit import MomentCodes as MomentCodes
from jaxmem.optim.low_bit import adam as adam
from jaxmem.optim.low_bit import adamw as adamw
from jaxmem.optim.low_bit import choose_codes as choose_codes
from jaxmem.optim.low_bit import kahan_summation as kahan_summation
from jaxmem.optim.low_bit import lion as lion
from jaxmem.optim.low_bit import scale_by_adam as scale_by_adam
from jaxmem.optim.low_bit import scale_by_lion as scale_by_lion
from jaxmem.optim.low_bit import split_master as split_master
from jaxmem.optim.low_bit import stochastic_rounding as stochastic_rounding
from jaxmem.optim.low_rank import ApolloState as ApolloState
from jaxmem.optim.low_rank import FiraState as FiraState
from jaxmem.optim.low_rank import GaLoreState as GaLoreState
from jaxmem.optim.low_rank import GaLoreSumState as GaLoreSumState
from jaxmem.optim.low_rank import apollo as apollo
from jaxmem.optim.low_rank import apollo_mini as apollo_mini
from jaxmem.optim.low_rank import fira as fira
from jaxmem.optim.low_rank import galore as galore
from jaxmem.optim.low_rank import scale_by_apollo as scale_by_apollo
from jaxmem.optim.low_rank import scale_by_fira as scale_by_fira
from jaxmem.optim.low_rank import scale_by_galore as scale_by_galore
from jaxmem.optim.orthogonal import MuonState as MuonState
from jaxmem.optim.orthogonal import muon as muon
from jaxmem.optim.preconditioned import ShampooState as ShampooState
from jaxmem.optim.preconditioned import SoapState as SoapState
from jaxmem.optim.preconditioned import scale_by_shampoo as scale_by_shampoo
from jaxmem.optim.preconditioned import scale_by_soap as scale_by_soap
from jaxmem.optim.preconditioned import shampoo as shampoo
from jaxmem.optim.preconditioned import soap as soap
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
    "LowBit",
    "MultiSteps",
    "RowGradients",
    "abstract_state",
    "accumulate_step",
    "adafactor",
    "adalomo",
    "adam",
    "adam_mini",
    "adama",
    "adamw",
    "apollo",
    "apollo_mini",
    "apply_step",
    "came",
    "choose_codes",
    "clip_by_layer_norm",
    "fira",
    "galore",
    "kahan_summation",
    "lazy_adam",
    "ledger",
    "lion",
    "lomo",
    "muon",
    "on_host",
    "rowwise",
    "rowwise_adagrad",
    "rowwise_sgd",
    "scale_by_adam",
    "scale_by_adam_mini",
    "scale_by_adama",
    "scale_by_apollo",
    "scale_by_came",
    "scale_by_factored_rms",
    "scale_by_fira",
    "scale_by_galore",
    "scale_by_lion",
    "scale_by_rowwise_adagrad",
    "scale_by_shampoo",
    "scale_by_sm3",
    "scale_by_soap",
    "schedule_free",
    "schedule_free_adamw",
    "schedule_free_eval_params",
    "shampoo",
    "sm3",
    "soap",
    "split_master",
    "start_step",
    "stochastic_rounding",
    "value_and_row_grad",
]
