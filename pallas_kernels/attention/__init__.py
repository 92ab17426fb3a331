"""Attention that keeps logits, probabilities and dropout's mask on the chip.

`tpu` and `gpu` have the same functions. `forward(inputs, rules, *, blocks)` returns
(o [b, t, n, h], the maximum of each row of logits [b, n, t], the logarithm of the sum
of the row's exponentials). `backward(inputs, results, g, rules, *, wanted, blocks)`
takes these three results and the cotangent of o, and returns (dq, dk, dv, dbias), None
for those that `wanted` does not name. `blocks` are (queries, keys) of a block, each
None for a default. Both raise NotImplementedError for arguments that they do not
support.
"""

from pallas_kernels.attention.inputs import MASKED as MASKED
from pallas_kernels.attention.inputs import Extras as Extras
from pallas_kernels.attention.inputs import Inputs as Inputs
from pallas_kernels.attention.inputs import Rules as Rules
from pallas_kernels.attention.inputs import all_of as all_of
from pallas_kernels.attention.inputs import dropout_mask as dropout_mask
from pallas_kernels.attention.inputs import dropout_row as dropout_row
from pallas_kernels.attention.inputs import near as near
