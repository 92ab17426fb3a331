"""Lean functions: the signatures of `jax.nn`, and less kept for the backward pass.

A family of ops is a folder: an op has a file in it, and `records.py` says what the rest
of the library is made from. What several families share is in `common` and `codes`.
"""

from jaxmem.ops.activations.elementwise import elementwise as elementwise
from jaxmem.ops.activations.gelu import gelu as gelu
from jaxmem.ops.activations.glu import geglu as geglu
from jaxmem.ops.activations.glu import glu as glu
from jaxmem.ops.activations.glu import swiglu as swiglu
from jaxmem.ops.activations.monotone import elu as elu
from jaxmem.ops.activations.monotone import leaky_relu as leaky_relu
from jaxmem.ops.activations.monotone import mish as mish
from jaxmem.ops.activations.monotone import relu as relu
from jaxmem.ops.activations.monotone import sigmoid as sigmoid
from jaxmem.ops.activations.monotone import softplus as softplus
from jaxmem.ops.activations.monotone import squared_relu as squared_relu
from jaxmem.ops.activations.monotone import tanh as tanh
from jaxmem.ops.activations.relu_sums import regelu2 as regelu2
from jaxmem.ops.activations.relu_sums import resilu2 as resilu2
from jaxmem.ops.activations.silu import silu as silu
from jaxmem.ops.activations.silu import swish as swish
from jaxmem.ops.activations.softmax import log_softmax as log_softmax
from jaxmem.ops.activations.softmax import softmax as softmax
from jaxmem.ops.attention.dot_product import (
    dot_product_attention as dot_product_attention,
)
from jaxmem.ops.codes.quantization import Quantization as Quantization
from jaxmem.ops.codes.ranges import stored_in_ranges as stored_in_ranges
from jaxmem.ops.codes.save_quantized import save_quantized as save_quantized
from jaxmem.ops.codes.stored import Stored as Stored
from jaxmem.ops.codes.stored import stored as stored
from jaxmem.ops.cross_entropy.linear import linear_cross_entropy as linear_cross_entropy
from jaxmem.ops.embedding.bag import embedding_bag as embedding_bag
from jaxmem.ops.embedding.embed import embed as embed
from jaxmem.ops.embedding.product_keys import product_key_memory as product_key_memory
from jaxmem.ops.few_bit.derivative import fewbit as fewbit
from jaxmem.ops.few_bit.derivative import fewbit_table as fewbit_table
from jaxmem.ops.linear.conv import conv as conv
from jaxmem.ops.linear.dense import dense as dense
from jaxmem.ops.norms.batch_norm import batch_norm as batch_norm
from jaxmem.ops.norms.dropout_add_norm import (
    dropout_add_layer_norm as dropout_add_layer_norm,
)
from jaxmem.ops.norms.dropout_add_norm import (
    dropout_add_rms_norm as dropout_add_rms_norm,
)
from jaxmem.ops.norms.group_norm import group_norm as group_norm
from jaxmem.ops.norms.inplace_abn import inplace_abn as inplace_abn
from jaxmem.ops.norms.layer_norm import layer_norm as layer_norm
from jaxmem.ops.norms.layer_norm import rms_norm as rms_norm
from jaxmem.ops.norms.ms_norm import Normalized as Normalized
from jaxmem.ops.norms.ms_norm import merge_scale as merge_scale
from jaxmem.ops.norms.ms_norm import ms_layer_norm as ms_layer_norm
from jaxmem.ops.norms.ms_norm import ms_rms_norm as ms_rms_norm
from jaxmem.ops.norms.ms_norm import unmerge_scale as unmerge_scale
from jaxmem.ops.randomness.dropout import dropout as dropout
from jaxmem.ops.sampled.dense import sampled_dense as sampled_dense
from jaxmem.ops.sampled.velora import velora_dense as velora_dense
from jaxmem.ops.sampled.velora import velora_projection as velora_projection
from jaxmem.ops.selection.max_pool import max_pool as max_pool
from jaxmem.ops.selection.where import where as where

__all__ = [
    "Quantization",
    "batch_norm",
    "conv",
    "dense",
    "dot_product_attention",
    "dropout",
    "dropout_add_layer_norm",
    "dropout_add_rms_norm",
    "elementwise",
    "elu",
    "embed",
    "embedding_bag",
    "fewbit",
    "fewbit_table",
    "geglu",
    "gelu",
    "glu",
    "group_norm",
    "inplace_abn",
    "layer_norm",
    "leaky_relu",
    "linear_cross_entropy",
    "log_softmax",
    "max_pool",
    "merge_scale",
    "mish",
    "ms_layer_norm",
    "ms_rms_norm",
    "product_key_memory",
    "regelu2",
    "relu",
    "resilu2",
    "rms_norm",
    "sampled_dense",
    "save_quantized",
    "sigmoid",
    "silu",
    "softmax",
    "softplus",
    "squared_relu",
    "stored",
    "stored_in_ranges",
    "swiglu",
    "swish",
    "tanh",
    "unmerge_scale",
    "velora_dense",
    "velora_projection",
    "where",
]
