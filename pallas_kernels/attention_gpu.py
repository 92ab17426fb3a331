"""Attention on Hopper (compute capability 9.0), forward and backward, with dropout.

Logits, probabilities and dropout's mask stay on the chip. A tile of logits is made from
blocks of queries and of keys in shared memory, by tensor cores, and kept in registers;
dropout's bits are those of the XLA path to the bit, since both count positions alike
(`_attention.dropout_row`). Blocks of keys that no query of a block sees are not
visited; a query that sees none takes the mean of all values, and its block visits all.

`forward(inputs, rules, *, block_q, block_kv)`, of the `Inputs` and `Rules` of
`dot_product.py`, gives (o[b, t, n, h], the maximum of each row of logits [b, n, t], the
logarithm of its sum). `backward(inputs, o, row_max, row_log_sum, g, rules, *, wanted,
block_q, block_kv)` gives (dq, dk, dv, None), None for what `wanted`, of "q", "k" and
"v", does not name. For the gradient of v alone neither o nor v is needed: None.

Done: bfloat16 and float16, heads of 64 and 128, lengths that 8 divides, fewer key heads
than query heads, segments [b, t] and [b, s], lengths [b], a window, `seed` uint32[2],
a bias [b|1, n|1, t|1, s] without a gradient and a mask, which becomes one: one that
differs among queries where 64 divides the lengths. Other arguments raise
NotImplementedError.

Read and written, in elements of the dtype of q: forward q, k, v and o once, and k and v
again for each further block of 128 queries, mostly from the second-level cache;
backward q, k, v and g by each of two kernels, o, and dq, dk, dv. Beside these up to
eight numbers of four bytes for each query and head. Products: 2 forward, 7 backward, of
2 b n t s h operations each, about half of them with a causal mask.

Not optimal: a program is one warpgroup, which copies, multiplies and exponentiates in
turn: tensor cores wait unless another program of the same processor has work for them
(two or three fit). Dropout's bits take seven integer operations an element, forward
once and backward twice, which is more than the exponential. Blocks that a mask leaves
whole are compared all the same. No time on a device stands behind the block sizes: they
are the largest that registers hold. With `q_len` o and g are copied once.

jax's own kernel refuses a causal mask under CUDA 12.8.0 to 12.9.0, whose ptxas
miscompiles it; that is not asked here. A simulator does products as XLA does, since it
knows none with an operand in registers.

Source: Dao et al., "FlashAttention" (2022), and Dao, "FlashAttention-2" (2023): the
running softmax, and the backward pass from row statistics.
"""

from pallas_kernels.attention_gpu_backward import backward
from pallas_kernels.attention_gpu_forward import forward

__all__ = ["backward", "forward"]
