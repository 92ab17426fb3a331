"""One block of attention's logits on a TPU, [keys, queries]: queries along lanes."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.arrays import dot
from pallas_kernels.attention import inputs as common
from pallas_kernels.attention.inputs import MASKED
from pallas_kernels.attention.tpu.blocks import Scalars, TpuCase


def where(condition, x, other: float = 0.0):
    """`x` (float32), or `other`; a condition of None holds everywhere."""
    return x if condition is None else jnp.where(condition, x, np.float32(other))


def rows_where(condition, x):
    """`x` of any dtype with zeros where a condition [rows, 1] does not hold."""
    if condition is None:
        return x
    return where(condition, x.astype(jnp.float32)).astype(x.dtype)


def column(row):
    """[1, n] as [n, 1], of 32-bit numbers."""
    return jnp.broadcast_to(row, (8, row.shape[1])).T[:, :1]


# By the suffix of a bias's name, how it is turned to have queries along lanes.
_LAYOUTS = {"": jnp.transpose, "_of_keys": column, "_of_queries": lambda x: x}


class LogitsBlock:
    """The block of logits at a point of the grid, for each head n of its pack.

    Attributes:
      t, s: positions of its queries [1, block_q] and of its keys [block_kv, 1].
      q_len, kv_len: lengths of the sequences; None if all are whole.
      whole: whether each of its queries sees each of its keys, but for a mask.
    """

    def __init__(self, case: TpuCase, scalars: Scalars, at, ins, whole: bool = False):
        self.case, self.scalars, self.at, self.ins = case, scalars, at, ins
        self.whole = whole
        sizes = case.sizes
        t = jax.lax.broadcasted_iota(jnp.int32, (1, sizes.block_q), 1)
        s = jax.lax.broadcasted_iota(jnp.int32, (sizes.block_kv, 1), 0)
        self.t, self.s = t + at.i * sizes.block_q, s + at.j * sizes.block_kv
        self.q_len = scalars.q_len[at.b] if case.q_len and not whole else None
        self.kv_len = scalars.kv_len[at.b] if case.kv_len and not whole else None

    def real_queries(self):
        """Which queries the array, or their sequence, has; None if all."""
        if self.q_len is not None:
            return self.t < self.q_len
        return self.queries_of_array(self.t)

    def queries_of_array(self, t):
        """Which positions `t` the array has; None if all."""
        sizes = self.case.sizes
        some = sizes.queries % sizes.block_q and not self.whole
        return t < sizes.queries if some else None

    def real_keys(self):
        """Which keys the array has; None if all."""
        sizes = self.case.sizes
        some = sizes.keys % sizes.block_kv and not self.whole
        return self.s < sizes.keys if some else None

    def alone(self, x, n: int):
        """`x` with zeros in place of the pack's other heads."""
        if self.case.sizes.pack == 1:
            return x
        lane = jax.lax.broadcasted_iota(jnp.int32, x.shape, 1)
        head = self.case.sizes.head
        mine = (lane >= n * head) & (lane < (n + 1) * head)
        return rows_where(mine, x)

    def rows(self, n: int) -> slice:
        """The rows of head n where heads lie along them."""
        head = self.case.sizes.head
        return slice(n * head, (n + 1) * head)

    def _bias(self, n: int):
        """The bias of head n, broadcasting to [block_kv, block_q]; or None."""
        found = None
        for name in ("bias", "mask"):
            for layout, turned in _LAYOUTS.items():
                if name + layout in self.ins:
                    ref = self.ins[name + layout]
                    x = ref[0, min(n, ref.shape[1] - 1)].astype(jnp.float32)
                    found = turned(x) if found is None else found + turned(x)
        return found

    def _seen(self):
        """Which keys the queries see, but for a mask; None if all."""
        ins, segments = self.ins, ()
        if "q_segments" in ins:
            segments = ins["q_segments"][0], column(ins["kv_segments"][0])
        rules = self.case.rules
        return common.visible(rules, self.t, self.s, *segments, kv_len=self.kv_len)

    def logits(self, n: int):
        """(logits [block_kv, block_q], which of them count or None)."""
        ins, rules = self.ins, self.case.rules
        q, k = self.alone(ins["q"][0], n), ins["k"][0]
        logits = dot(k, q, (1, 1)) * rules.scale
        bias = self._bias(n)
        if bias is not None:
            logits = logits + bias
        seen = None if self.whole else self._seen()
        if self.case.hides and bias is not None:
            shown = jnp.broadcast_to(bias, logits.shape) > -np.inf
            seen = shown if seen is None else seen & shown
        logits = where(seen, logits, MASKED)
        return where(self.real_keys(), logits, -jnp.inf), seen

    def dropout(self, n: int):
        """A function that puts zeros where dropout has them."""
        rules, sizes = self.case.rules, self.case.sizes
        if not rules.rate:
            return lambda x: x
        b, head, t, s = (
            jnp.asarray(x).astype(jnp.uint32)
            for x in (self.at.b, self.at.pack * sizes.pack + n, self.t, self.s)
        )
        row = common.dropout_row(rules, b, head, t, sizes.heads, sizes.queries)
        keep = common.dropout_mask(
            rules, (self.scalars.seed[0], self.scalars.seed[1]), row, s
        )
        return lambda x: where(keep, x)
