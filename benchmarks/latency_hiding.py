"""XLA:GPU's latency-hiding scheduler on and off: what it takes, plain and scheduled.

    python -m benchmarks.latency_hiding

Training steps with Adam, all state donated, for an H100. "scheduled for it" has
searched with a target: the compiler has chosen among the step as given, with released
gradients, and in an order of its own.
"""

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MS, publish, size_and_ms
from benchmarks.blocks import TARGET
from benchmarks.release import dense_step

SWITCH = "xla_gpu_enable_latency_hiding_scheduler"


def scanned_step(layers: int = 16, width: int = 2048, batch: int = 4096):
    """Adam on dense layers in a scan."""
    tx = optax.adam(1e-3)

    def loss(params, x):
        layer = lambda x, w: (jnp.tanh(x @ w), None)
        return jnp.mean(jax.lax.scan(layer, x, params)[0] ** 2)

    def step(params, moments, x):
        grads = jax.grad(loss)(params, x)
        updates, moments = tx.update(grads, moments, params)
        return optax.apply_updates(params, updates), moments

    params = jax.ShapeDtypeStruct((layers, width, width), jnp.float32)
    x = jax.ShapeDtypeStruct((batch, width), jnp.float32)
    return step, (params, jax.eval_shape(tx.init, params), x)


STEPS = {
    "16 dense layers of 4096, unrolled": dense_step,
    "16 dense layers of 2048, scanned": scanned_step,
}


def row(name: str, hides: bool):
    step, args = STEPS[name]()
    how = {"compiler_options": {SWITCH: hides}}
    donated = {"donate_argnums": (0, 1)}
    plain = jax.jit(step, **donated)
    ours = jaxmem.schedule(step, **donated, **how)
    chosen = jaxmem.schedule(step, target=TARGET, **donated, **how)
    both = (
        size_and_ms(jaxmem.estimate(fn, *args, target=TARGET, **how))
        for fn in (plain, ours, chosen)
    )
    return name, "on" if hides else "off", *(cell for pair in both for cell in pair)


def main() -> None:
    rows = [row(name, hides) for name in STEPS for hides in (False, True)]
    ways = {"plain": " MiB", "scheduled": "", "scheduled for it": ""}
    pairs = ((f"{how}{unit}", f"{how}: {MS}") for how, unit in ways.items())
    columns = ("step", "latency hiding", *(column for pair in pairs for column in pair))
    publish("latency_hiding", columns, rows)


if __name__ == "__main__":
    main()
