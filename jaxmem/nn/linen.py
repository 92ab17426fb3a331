"""Drop-in layers for `flax.linen`: the same constructors, parameters and outputs.

Each class is a subclass of Flax's, so fields, names, parameter creation, initial values
and `isinstance` are Flax's own; `__call__` runs on `jaxmem.ops`. Outputs and gradients
equal Flax's up to rounding. Two things differ on purpose: dropout masks come from
jaxmem's counter-based generator (same distribution, other bits than Flax's for the same
key), and the softmax of the attention is always computed in float32.

What no lean op serves (a `dot_general`, `promote_dtype` or `attention_fn` of one's own,
`batch_dims`, an attention `precision`, `decode`, `sow_weights`, norms of complex inputs
or without float32 statistics) runs Flax's own code and warns once.
"""

from typing import TYPE_CHECKING

from jaxmem._deprecated import names_gone
from jaxmem.nn._dense_linen import LoRADense as LoRADense
from jaxmem.nn._layers_linen import BatchNorm as BatchNorm
from jaxmem.nn._layers_linen import Conv as Conv
from jaxmem.nn._layers_linen import Dense as Dense
from jaxmem.nn._layers_linen import DenseGeneral as DenseGeneral
from jaxmem.nn._layers_linen import Dropout as Dropout
from jaxmem.nn._layers_linen import GroupNorm as GroupNorm
from jaxmem.nn._layers_linen import InPlaceABN as InPlaceABN
from jaxmem.nn._layers_linen import LayerNorm as LayerNorm
from jaxmem.nn._layers_linen import MSLayerNorm as MSLayerNorm
from jaxmem.nn._layers_linen import MSRMSNorm as MSRMSNorm
from jaxmem.nn._layers_linen import MultiHeadAttention as MultiHeadAttention
from jaxmem.nn._layers_linen import (
    MultiHeadDotProductAttention as MultiHeadDotProductAttention,
)
from jaxmem.nn._layers_linen import RMSNorm as RMSNorm
from jaxmem.nn._layers_linen import SelfAttention as SelfAttention
from jaxmem.nn._memory_linen import ProductKeyMemory as ProductKeyMemory
from jaxmem.nn._mesa_linen import MesaDense as MesaDense
from jaxmem.nn._reversible_linen import Reversible as Reversible
from jaxmem.nn._sampled_linen import SampledDense as SampledDense
from jaxmem.nn._sampled_linen import VeLoRADense as VeLoRADense
from jaxmem.nn._tiers_linen import MultiTierAdapter as MultiTierAdapter

__all__ = [
    "BatchNorm",
    "Conv",
    "Dense",
    "DenseGeneral",
    "Dropout",
    "GroupNorm",
    "InPlaceABN",
    "LayerNorm",
    "LoRADense",
    "MSLayerNorm",
    "MSRMSNorm",
    "MesaDense",
    "MultiHeadAttention",
    "MultiHeadDotProductAttention",
    "MultiTierAdapter",
    "ProductKeyMemory",
    "RMSNorm",
    "Reversible",
    "SampledDense",
    "SelfAttention",
    "VeLoRADense",
]

if not TYPE_CHECKING:  # for which every name would be there
    _copy = "copy it from examples/transformer_blocks.py in the repository"
    _gone = {"LlamaBlock": _copy, "TransformerBlock": _copy}
    __getattr__ = names_gone(__name__, "0.2.0", _gone)
