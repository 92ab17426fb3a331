"""Drop-in layers for `flax.nnx`: the same constructors, parameters and outputs.

Each class is a subclass of Flax's whose `__call__` runs on `jaxmem.ops`; constructors,
parameters, state paths and initial values are Flax's own. As in `jaxmem.nn.linen`,
dropout draws other masks, the softmax of the attention is always in float32, and what
no lean op serves runs Flax's own code and warns once.
"""

from typing import TYPE_CHECKING

from jaxmem._deprecated import names_gone
from jaxmem.nn._layers_nnx import BatchNorm as BatchNorm
from jaxmem.nn._layers_nnx import Conv as Conv
from jaxmem.nn._layers_nnx import Dropout as Dropout
from jaxmem.nn._layers_nnx import GroupNorm as GroupNorm
from jaxmem.nn._layers_nnx import InPlaceABN as InPlaceABN
from jaxmem.nn._layers_nnx import LayerNorm as LayerNorm
from jaxmem.nn._layers_nnx import Linear as Linear
from jaxmem.nn._layers_nnx import LinearGeneral as LinearGeneral
from jaxmem.nn._layers_nnx import MSLayerNorm as MSLayerNorm
from jaxmem.nn._layers_nnx import MSRMSNorm as MSRMSNorm
from jaxmem.nn._layers_nnx import MultiHeadAttention as MultiHeadAttention
from jaxmem.nn._layers_nnx import RMSNorm as RMSNorm
from jaxmem.nn._memory_nnx import ProductKeyMemory as ProductKeyMemory
from jaxmem.nn._mesa_nnx import MesaDense as MesaDense
from jaxmem.nn._nnx_attention import dot_product_attention as dot_product_attention
from jaxmem.nn._reversible_nnx import Reversible as Reversible
from jaxmem.nn._sampled_nnx import NormCache as NormCache
from jaxmem.nn._sampled_nnx import SampledDense as SampledDense
from jaxmem.nn._sampled_nnx import VeLoRADense as VeLoRADense
from jaxmem.nn._tiers_nnx import MultiTierAdapter as MultiTierAdapter

__all__ = [
    "BatchNorm",
    "Conv",
    "Dropout",
    "GroupNorm",
    "InPlaceABN",
    "LayerNorm",
    "Linear",
    "LinearGeneral",
    "MSLayerNorm",
    "MSRMSNorm",
    "MesaDense",
    "MultiHeadAttention",
    "MultiTierAdapter",
    "NormCache",
    "ProductKeyMemory",
    "RMSNorm",
    "Reversible",
    "SampledDense",
    "VeLoRADense",
]

if not TYPE_CHECKING:  # for which every name would be there
    _gone = {
        "LlamaBlock": "copy it from examples/transformer_blocks_nnx.py in the "
        "repository",
        "TransformerBlock": "docs/blocks.md says how to write it, and "
        "examples/transformer_blocks.py in the repository has it in linen",
    }
    __getattr__ = names_gone(__name__, "0.2.0", _gone)
