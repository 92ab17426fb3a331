"""Lean functions: the signatures of `jax.nn`, and less kept for the backward pass."""

from jaxmem.ops._activations import elu as elu
from jaxmem.ops._activations import leaky_relu as leaky_relu
from jaxmem.ops._activations import mish as mish
from jaxmem.ops._activations import relu as relu
from jaxmem.ops._activations import sigmoid as sigmoid
from jaxmem.ops._activations import softplus as softplus
from jaxmem.ops._activations import squared_relu as squared_relu
from jaxmem.ops._activations import tanh as tanh
from jaxmem.ops._attention import dot_product_attention as dot_product_attention
from jaxmem.ops._batch_norm import batch_norm as batch_norm
from jaxmem.ops._conv import conv as conv
from jaxmem.ops._dense import dense as dense
from jaxmem.ops._dropout import dropout as dropout
from jaxmem.ops._dropout_add_norm import (
    dropout_add_layer_norm as dropout_add_layer_norm,
)
from jaxmem.ops._dropout_add_norm import dropout_add_rms_norm as dropout_add_rms_norm
from jaxmem.ops._elementwise_fn import elementwise as elementwise
from jaxmem.ops._fewbit import fewbit as fewbit
from jaxmem.ops._fewbit import fewbit_table as fewbit_table
from jaxmem.ops._fewbit_approx import regelu2 as regelu2
from jaxmem.ops._fewbit_approx import resilu2 as resilu2
from jaxmem.ops._gelu import gelu as gelu
from jaxmem.ops._glu import geglu as geglu
from jaxmem.ops._glu import glu as glu
from jaxmem.ops._glu import swiglu as swiglu
from jaxmem.ops._group_norm import group_norm as group_norm
from jaxmem.ops._inplace_abn import inplace_abn as inplace_abn
from jaxmem.ops._layer_norm import layer_norm as layer_norm
from jaxmem.ops._layer_norm import rms_norm as rms_norm
from jaxmem.ops._linear_cross_entropy import (
    linear_cross_entropy as linear_cross_entropy,
)
from jaxmem.ops._max_pool import max_pool as max_pool
from jaxmem.ops._ms_norm import Normalized as Normalized
from jaxmem.ops._ms_norm import merge_scale as merge_scale
from jaxmem.ops._ms_norm import ms_layer_norm as ms_layer_norm
from jaxmem.ops._ms_norm import ms_rms_norm as ms_rms_norm
from jaxmem.ops._ms_norm import unmerge_scale as unmerge_scale
from jaxmem.ops._quantize import Quantization as Quantization
from jaxmem.ops._quantized import Stored as Stored
from jaxmem.ops._quantized import stored as stored
from jaxmem.ops._sampled_dense import sampled_dense as sampled_dense
from jaxmem.ops._save_quantized import save_quantized as save_quantized
from jaxmem.ops._silu import silu as silu
from jaxmem.ops._silu import swish as swish
from jaxmem.ops._softmax import log_softmax as log_softmax
from jaxmem.ops._softmax import softmax as softmax
from jaxmem.ops._velora import velora_dense as velora_dense
from jaxmem.ops._velora import velora_projection as velora_projection
from jaxmem.ops._where import where as where
