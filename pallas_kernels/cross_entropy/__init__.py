"""Cross entropy of a linear layer's logits, which never lie in memory as a whole.

`tpu` has these functions. They raise NotImplementedError for arguments that they do not
support. On a GPU XLA's products are faster than ours would be: see `docs/kernels.md`.

`forward(x, kernel, bias, labels, options, *, sums)` returns what is known of each
token, float32 [tokens]: "top", the largest logit; "log_total", the logarithm of the sum
of `exp(logits - top)`; "hit", the label's logit, or 0; with `sums` "total", the sum of
all logits.

    x: [tokens, features].
    kernel: [features, vocabulary], or with `vocab_axis=0` [vocabulary, features]. It is
      cast to the dtype of x, a block at a time.
    bias: [vocabulary], or None.
    labels: int32 [tokens]; one outside of the vocabulary hits nothing.

`backward(arrays, rows, g, unit, options, *, wanted)` returns the gradients of those of
"x", "kernel" and "bias" that are in `wanted`.

    arrays: (x, kernel, bias, labels) as above.
    rows: "top" and "log_total" of `forward`.
    g: cotangents of "log_total", "hit" and "total", which may be None.
    unit: float32 scalar, by which the gradients are multiplied before they are rounded
      to the dtypes of their arrays.
"""

from pallas_kernels.cross_entropy.inputs import LossOptions as LossOptions
