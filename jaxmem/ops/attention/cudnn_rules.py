"""What cuDNN's attention takes: only what means the same there as here.

Each rule has its reason beside it, and where others have met the defect, the report.
What is refused is computed by XLA in blocks.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp

from jaxmem.ops.attention.block import Extras, Rules
from pallas_kernels.chips import AMPERE, capability

# What the kernels' blocks have; others are padded with zeros (jax#23701: 48 crashed).
HEADS = (64, 128)
OLDEST = 90800  # the version that the oldest supported jaxlib asks for
# TransformerEngine#2344: reads out of bounds under CUDA graphs.
BROKEN = range(91300, 91500)
BROKEN_FROM = 1024


class CudnnForm(NamedTuple):
    """How the rules of an attention are handed to cuDNN.

    Attributes:
      causal: by its own causal mask.
      window: keys that a query sees, itself and those before it; None: all.
      padded: lengths of keys by its own padding.
    """

    causal: bool = False
    window: int | None = None
    padded: bool = False


def form_of(rules: Rules, extras: Extras) -> CudnnForm:
    """The form; which of its rules hold is for `refusal` to say."""
    window = rules.window
    causal = rules.causal or (window is not None and window[1] == 0)
    left = None if window is None else window[0] + 1
    return CudnnForm(causal, left, extras.kv_len is not None)


def refusal(rules: Rules, q: Any, k: Any, bias: Any, extras: Extras) -> str:
    """Why cuDNN does not take this; "" where it does.

    Args:
      rules: of the attention.
      q, k: [b, t, n, h] and [b, s, kh, h], arrays or their types.
      bias: None, or what is added to the logits.
      extras: inputs without a gradient.
    """
    t, s, h = q.shape[1], k.shape[1], q.shape[-1]
    form = form_of(rules, extras)
    along = form.causal or form.window is not None
    if rules.rate:
        # A counter beside the compiled program draws them, whatever the key, and not in
        # the order of a backward loop; jaxlib 0.11.2 aborts the process.
        return "dropout: its masks are other ones in a backward loop"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype.name}: it computes in 16 bits"
    if h > HEADS[-1]:
        return f"heads of {h}: at most {HEADS[-1]}"
    if bias is not None:
        # jax#32242: NaN for float32; and its row statistics lose a row of -1e9.
        return "a bias: rows of large negative numbers have wrong gradients"
    if extras.mask is not None or extras.q_segments is not None:
        # It has none but a bias; cudnn-frontend#1072, pytorch#196678: NaN with one.
        return "a mask: NaN in gradients at some lengths (pytorch#196678)"
    if t == 1 or s == 1:
        return "one query or key: NaN in gradients (cudnn-frontend#1072)"
    if form.window is not None and not form.causal:
        return "a window on both sides: it looks back alone"
    if along and t != s:
        return f"{t} queries and {s} keys under a causal mask"
    if along and form.padded:
        return "lengths under a causal mask: a row that sees no key takes all values"
    return ""


def suits(form: CudnnForm, keys: int, device: Any, version: int | None) -> bool:
    """Whether a device and its cuDNN take this.

    Args:
      form: how the rules are handed over.
      keys: of an example.
      device: that a program is lowered for.
      version: of the cuDNN that will run it, as 91002; None where that is not known.
    """
    have = capability(device)
    if have is not None and have < AMPERE:
        return False
    if version is None:
        return True
    broken = version in BROKEN and keys > BROKEN_FROM and not form.causal
    return version >= OLDEST and not broken
