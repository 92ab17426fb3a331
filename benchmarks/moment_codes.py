"""How far the updates of Adam with moments in codes are from those in float32.

    python -m benchmarks.moment_codes          # every code
    python -m benchmarks.moment_codes nvfp4    # this one; the others stay

300 steps on one matrix of 64 by 256, whose gradients are noise around a mean of 0.3
standard deviations. "even": of one size; "spread" and "heavy-tailed": each element has
a size of its own, log-normal with a spread of 1 and of 3 of its logarithm. The error is
the norm of the difference by that of float32's update, its mean from step 50 on; the
share is how long the update is along float32's; the largest update is any element's.
"""

import functools
import sys

import jax
import jax.numpy as jnp

from benchmarks._common import publish_some
from jaxmem.optim import LowBit, scale_by_adam

CODES = {
    "companding": LowBit(8),
    "float8": LowBit(8, code="float8"),
    "dynamic": LowBit(8, code="dynamic"),
    "mxfp8": LowBit(8, code="mxfp8"),
    "4-bit dynamic": LowBit(4),
    "mxfp4": LowBit(4, code="mxfp4"),
    "nvfp4": LowBit(4, code="nvfp4"),
}
GRADIENTS = {"even": 0.0, "spread": 1.0, "heavy-tailed": 3.0}
COLUMNS = ("code", "gradients", "error", "share", "largest update", "float32's largest")
STEPS, FIRST, SHAPE, MEAN = 300, 50, (64, 256), 0.3


def measure(code: str, gradients: str) -> tuple[str, ...]:
    tx, wide = scale_by_adam(bits=CODES[code]), scale_by_adam(bits=32)
    key = jax.random.key(0)
    sizes = 1e-2 * jnp.exp(GRADIENTS[gradients] * jax.random.normal(key, SHAPE))

    def step(states, i):
        g = sizes * (MEAN + jax.random.normal(jax.random.fold_in(key, i), SHAPE))
        u, coded = tx.update(g, states[0])
        w, plain = wide.update(g, states[1])
        norm = jnp.linalg.norm(w)
        largest = jnp.abs(u).max(), jnp.abs(w).max()
        return (coded, plain), (
            jnp.linalg.norm(u - w) / norm,
            jnp.vdot(u, w) / norm**2,
            *largest,
        )

    run = jax.jit(lambda states: jax.lax.scan(step, states, jnp.arange(STEPS))[1])
    error, share, largest, plain = run((tx.init(sizes), wide.init(sizes)))
    means = (float(x[FIRST:].mean()) for x in (error, share))
    tops = (float(x.max()) for x in (largest, plain))
    return tuple(f"{x:.3g}" for x in (*means, *tops))


if __name__ == "__main__":
    rows = {
        (code, kind): functools.partial(measure, code, kind)
        for code in CODES
        for kind in GRADIENTS
    }
    publish_some("moment_codes", COLUMNS, rows, sys.argv[1:])
