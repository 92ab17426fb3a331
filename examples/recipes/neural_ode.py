"""A neural ODE by Diffrax: what its adjoints take, before one of them is run.

    pip install diffrax && python examples/recipes/neural_ode.py

A vector field, an Equinox module, is fitted to arcs of a damped pendulum. The adjoint
decides how many of the solver's states are kept for the backward pass; the rest is
solved a second time. `jaxmem.estimate` says what a step takes with each of them, and
`jaxmem.schedule` runs the step with the one that was chosen.
"""

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem

WIDTH, ARCS, TIMES, MOST = 64, 256, 20, 128
TX = optax.adam(3e-3)
ADJOINTS = {
    "every step kept": diffrax.DirectAdjoint(),
    "16 checkpoints": diffrax.RecursiveCheckpointAdjoint(checkpoints=16),
    "4 checkpoints": diffrax.RecursiveCheckpointAdjoint(checkpoints=4),
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
    """[TIMES, 2], the states at times from 0 to 4."""
    times = jnp.linspace(0.0, 4.0, TIMES)
    return diffrax.diffeqsolve(
        diffrax.ODETerm(field),
        diffrax.Tsit5(),
        times[0],
        times[-1],
        dt0=0.05,
        y0=start,
        saveat=diffrax.SaveAt(ts=times),
        stepsize_controller=diffrax.ConstantStepSize(),
        adjoint=adjoint,
        max_steps=MOST,
        throw=False,  # an error would be a callback to Python; times are inf instead
    ).ys


def arcs(seed):
    """[ARCS, TIMES, 2]"""
    start = np.random.default_rng(seed).uniform(-2, 2, (ARCS, 2)).astype(np.float32)
    of_one = lambda y: solve(pendulum, y, diffrax.RecursiveCheckpointAdjoint())
    return jax.jit(jax.vmap(of_one))(start)


def make_step(adjoint):
    def step(field, opt_state, arcs):
        @eqx.filter_value_and_grad
        def loss_fn(field):
            of_one = lambda y: solve(field, y, adjoint)
            return jnp.mean((jax.vmap(of_one)(arcs[:, 0]) - arcs) ** 2)

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
        field, opt_state, loss = run(field, opt_state, arcs(i))
        losses.append(float(loss))
    return field, losses


def main():
    donated = {"donate_argnums": (0, 1)}
    for name, adjoint in ADJOINTS.items():
        report = jaxmem.estimate(make_step(adjoint), *make_state(), arcs(0), **donated)
        print(f"{name}: peak {report.peak_bytes:,} bytes")
    run = jaxmem.schedule(make_step(ADJOINTS["16 checkpoints"]), **donated)
    _, losses = train(run, 100)
    print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}")


if __name__ == "__main__":
    main()
