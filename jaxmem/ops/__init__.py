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
from jaxmem.ops._dense import dense as dense
from jaxmem.ops._dropout import dropout as dropout
from jaxmem.ops._gelu import gelu as gelu
from jaxmem.ops._glu import geglu as geglu
from jaxmem.ops._glu import glu as glu
from jaxmem.ops._glu import swiglu as swiglu
from jaxmem.ops._group_norm import group_norm as group_norm
from jaxmem.ops._layer_norm import layer_norm as layer_norm
from jaxmem.ops._layer_norm import rms_norm as rms_norm
from jaxmem.ops._silu import silu as silu
from jaxmem.ops._silu import swish as swish
from jaxmem.ops._softmax import log_softmax as log_softmax
from jaxmem.ops._softmax import softmax as softmax
