"""Attention on a TPU, forward and backward, with dropout.

Queries lie along the lanes: logits are held as [keys, queries]. A row's maximum and sum
are then [1, queries]: they are reduced over sublanes, broadcast for free, and written
as they are. A block of an array holds as many heads as fill 128 lanes (two of 64),
straight from [b, t, n * h]. A head's product contracts all 128 lanes, with those of the
other heads set to zero, which takes the matrix unit no longer. Head sizes that do not
fill 128 lanes evenly, and odd numbers of heads, are padded first.

Forward: for each block of queries, blocks of keys in sequence, with a running maximum
and sum. Backward, from the row statistics and delta = sum(g * o): for each block of
keys, blocks of queries in sequence, with dk and dv as sums, and dq of all queries as a
float32 sum on the chip. If there is no room for it (at 64 channels and bfloat16 from
about 9000 queries on where a core has 16 MiB, and 50000 where it has 60 or more), a
second pass, in the order of the forward pass, computes dq. The gradient of a bias is a
pass of its own (`bias`).
Blocks hidden by position (causal, window, lengths) are neither computed nor fetched,
those hidden by segments are not computed. Blocks that are wholly visible take no mask.

Memory traffic in elements, with Q = b t n h, K = b s n h and `seen` the fraction of
block pairs that are visited: forward 2 Q + 2 K (t / block_q) seen; backward
4 K kh / n + Q + 2 Q (s / block_kv) seen, in two passes 2 Q + 2 K (t / block_q) seen
more; and float32 row statistics of b n t, two out, and three in for each block of keys.
The gradient of a bias reads as much as such a pass for dk and dv, or, if it differs
among queries, q, g, k and v for each pair of blocks.

Limits: nothing was timed on a device. A row whose visible keys all have a bias below
-1.6e38 attends, in the XLA path, to keys that the rules hide; here blocks that are not
visited are left out.

Source: Dao et al., "FlashAttention" (2022); Dao, "FlashAttention-2" (2023). Separate
code for blocks without a mask: splash attention, in jax's own kernels for TPUs.
"""

from pallas_kernels.attention.tpu.backward import backward as backward
from pallas_kernels.attention.tpu.forward import forward as forward
