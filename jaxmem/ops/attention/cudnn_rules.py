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
MASK_BYTES = 64 * 2**20  # of a mask that is handed over as a bias
# cudnn-frontend#1072, pytorch#196678: with a bias, NaN at lengths in between.
MULTIPLE = 128
OLDEST = 90800  # the version that the oldest supported jaxlib asks for
# TransformerEngine#2344: reads out of bounds under CUDA graphs.
BROKEN = range(91300, 91500)
BROKEN_FROM = 1024


class Form(NamedTuple):
    """How the rules of an attention are handed to cuDNN.

    Attributes:
      causal: by its own causal mask.
      window: keys that a query sees, itself and those before it; None: all.
      padded: lengths of keys by its own padding.
      masked: all rules together as a bias of zeros and large negative numbers.
    """

    causal: bool = False
    window: int | None = None
    padded: bool = False
    masked: bool = False


def form_of(rules: Rules, q: Any, k: Any, extras: Extras) -> Form:
    """The form; which of its rules hold is for `refusal` to say."""
    window = rules.window
    if extras.mask is not None or extras.q_segments is not None:
        return Form(masked=True)
    if window is None and not rules.causal:
        return Form(padded=extras.kv_len is not None)
    causal = rules.causal or (window is not None and window[1] == 0)
    square = q.shape[1] == k.shape[1]
    if not (causal and square) or extras.kv_len is not None:
        return Form(masked=True)
    return Form(causal=True, window=None if window is None else window[0] + 1)


def refusal(rules: Rules, q: Any, k: Any, bias: Any, extras: Extras) -> str:
    """Why cuDNN does not take this; "" where it does.

    Args:
      rules: of the attention.
      q, k: [b, t, n, h] and [b, s, kh, h], arrays or their types.
      bias: None, or what is added to the logits.
      extras: inputs without a gradient.
    """
    t, s, h = q.shape[1], k.shape[1], q.shape[-1]
    form = form_of(rules, q, k, extras)
    if rules.rate:
        # A counter beside the compiled program draws them: a backward loop would meet
        # its layers' masks in the order of the forward loop, and a key has no effect.
        return "dropout: its masks are other ones in a backward loop"
    if q.dtype not in (jnp.bfloat16, jnp.float16):
        return f"{q.dtype.name}: it computes in 16 bits"
    if h > HEADS[-1]:
        return f"heads of {h}: at most {HEADS[-1]}"
    if bias is not None:
        # jax#32242: NaN for float32; and its row statistics lose a row of -1e9.
        return "a bias: rows of large negative numbers have wrong gradients"
    if t == 1 or s == 1:
        return "one query or key: NaN in gradients (cudnn-frontend#1072)"
    if form.masked and (t % MULTIPLE or s % MULTIPLE):
        return f"a mask, and lengths that {MULTIPLE} does not divide (pytorch#196678)"
    if form.masked and mask_bytes(rules, q, k, extras) > MASK_BYTES:
        return "a mask that is too large as a bias"
    return ""


def mask_bytes(rules: Rules, q: Any, k: Any, extras: Extras) -> int:
    """Bytes of the bias that stands for all rules."""
    rows = [x.shape[0] for x in extras[:3] if x is not None]
    rows += [x.shape[0] for x in extras[4:] if x is not None]
    heads = 1 if extras.mask is None else extras.mask.shape[1]
    return max(rows, default=1) * heads * q.shape[1] * k.shape[1] * q.dtype.itemsize


def suits(form: Form, keys: int, device: Any, version: int | None) -> bool:
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
