"""Attention on Hopper (compute capability 9.0), forward and backward, with dropout.

Tensor cores make a tile of logits from blocks of queries and of keys in shared memory;
it stays in registers. Dropout's bits are exactly those of the XLA path, since both
count positions alike (`inputs.dropout_row`). Blocks of keys that no query of a block
sees are not visited; a query that sees none takes the mean of all values, and its block
visits all.

Supported: bfloat16 and float16, heads of 64 and 128, lengths divisible by 8, fewer key
heads than query heads, segments [b, t] and [b, s], lengths [b], a window, `seed`
uint32[2], a bias [b|1, n|1, t|1, s], and a mask: bits if it differs among queries, and
else a bias of keys. If a bias differs among queries, 64 must divide the lengths; its
gradient is a kernel of its own (`bias`).

Memory traffic in elements of the dtype of q: forward q, k, v and o once, and k and v
once more for each further block of 128 or 256 queries, mostly from the second-level
cache; backward q, k, v and g by each of two kernels, o, and dq, dk, dv. In addition
up to eight numbers of four bytes for each query and head. Products: 2 forward, 7
backward, 2 more for the gradient of a bias that differs among queries, of 2 b n t s h
operations each, about half of them with a causal mask.

Tiles that no mask cuts have a loop of their own, without comparisons. Dropout draws a
word for two keys (`dropout`); where keys stay, a thread has one of the two and draws a
word for each element.

Where 512 positions or more stream, a program has two warpgroups that multiply: they
read the same tiles in shared memory, so the second-level cache sends half as much. A
third one copies these tiles, and leaves its registers to the others. In the forward
pass one of the two multiplies while the other exponentiates (`pingpong`). Where all
blocks have the same work, without a causal mask, a window or lengths, there are as many
programs as processors, and each takes one block after the other (`grid`).

The sizes of tiles are those of which machine code needs the least clocks an element
(`python -m benchmarks.kernels --sass`), among those that shared memory has room for and
registers all but hold: two kernels spill some 25. They agree with the configurations
that tokamax has found by timing its kernels of the same design on an H100 (its
`data/autotuning`): two warpgroups at each length from 512 on, 64 or 128 queries by 128
keys forward, 64 or 128 by 64 backward.

Limits: a warpgroup waits for its own products: tensor cores have work only while
another one has some for them. With segments or a boolean mask every tile is compared.
With a causal mask a block of keys computes one tile of 64 by 64 that is wholly hidden,
for its second warpgroup. An H200 has timed the passes, and not yet these choices beside
others, as `benchmarks.device` would. With `q_len`, o and g are copied once.

jax's own kernel refuses a causal mask under CUDA 12.8.0 to 12.9.0, whose ptxas
miscompiles it; this one does not check for that. The simulator computes products with
XLA, since it supports none with an operand in registers.

Source: Dao et al., "FlashAttention" (2022), and Dao, "FlashAttention-2" (2023): the
running softmax, and the backward pass from row statistics.
"""

from pallas_kernels.attention.gpu.backward import backward as backward
from pallas_kernels.attention.gpu.forward import forward as forward
