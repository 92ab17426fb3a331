"""A neural ODE by Diffrax: what its adjoints take, before one of them is run.

    pip install diffrax && python examples/recipes/neural_ode.py

A vector field, an Equinox module, is fitted to where a damped pendulum gets to. The
adjoint decides how many of the solver's states are kept for the backward pass; the rest
is solved a second time. `jaxmem.estimate` says what a step takes with each of them, and
`jaxmem.schedule` runs the step with the one that was chosen.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem

WIDTH, BATCH, STEPS = 64, 256, 64
TX = optax.adam(3e-3)
ADJOINTS = {
    "every step kept": diffrax.DirectAdjoint(),
    "16 checkpoints": diffrax.RecursiveCheckpointAdjoint(checkpoints=16),
}


def pendulum(t, y, args):
    angle, speed = y
    return jnp.stack([speed, -jnp.sin(angle) - 0.1 * speed])


class Field(eqx.Module):
    net: eqx.nn.MLP

    def __init__(self, key):
        self.net = eqx.nn.MLP(2, 2, WIDTH, 2, activation=jnp.tanh, key=key)

    def __call__(self, t, y, args):
        return self.net(y)


def solve(field, start, adjoint):
    """The state after four seconds."""
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        t0=0.0,
        t1=4.0,
        dt0=4.0 / STEPS,
        y0=start,
        adjoint=adjoint,
        max_steps=STEPS + 1,
        throw=False,  # else a callback to Python is in the step
    ).ys[-1]


@jax.jit
def moved(start):
    """What becomes of the pendulums in these states, [BATCH, 2]."""
    adjoint = ADJOINTS["16 checkpoints"]
    return jax.vmap(lambda y: solve(pendulum, y, adjoint))(start)


def batch(seed):
    start = np.random.default_rng(seed).uniform(-2, 2, (BATCH, 2)).astype(np.float32)
    return start, moved(start)


def make_step(adjoint):
    def step(field, opt_state, batch):
        start, end = batch

        @eqx.filter_value_and_grad
        def loss_fn(field):
            of_one = lambda y: solve(field, y, adjoint)
            return jnp.mean((jax.vmap(of_one)(start) - end) ** 2)

        loss, grads = loss_fn(field)
        updates, opt_state = TX.update(grads, opt_state, field)
        return eqx.apply_updates(field, updates), opt_state, loss

    return step


def make_state():
    field = Field(jax.random.key(0))
    return field, TX.init(eqx.filter(field, eqx.is_array))


def train(run, steps):
    (field, opt_state), losses = make_state(), []
    for i in range(steps):
        field, opt_state, loss = run(field, opt_state, batch(i))
        losses.append(float(loss))
    return field, losses


def main():
    donated = {"donate_argnums": (0, 1)}
    for name, adjoint in ADJOINTS.items():
        report = jaxmem.estimate(make_step(adjoint), *make_state(), batch(0), **donated)
        print(f"{name}: peak {report.peak_bytes:,} bytes")
    run = jaxmem.schedule(make_step(ADJOINTS["16 checkpoints"]), **donated)
    _, losses = train(run, 100)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
