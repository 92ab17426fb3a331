"""Offload: gradients and updates with arrays in the host's memory, and without.

XLA:GPU of old versions takes slices of the host's arrays from other places than is
meant, and nothing says so (memory/buffers/wrong_slices.py). Layers have weights
of their own, so that one layer's residuals in place of another's are far off. A policy
of JAX alone may be wrong, where the check of the program's text says it; a job fails
where the two do not agree, or where anything of jaxmem's is off.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from benchmarks.device import seconds
from benchmarks.device.job import Job, Rows
from jaxmem.ir import jaxprs
from jaxmem.ir.host_slices import COPIES
from jaxmem.memory.buffers import parse_hlo, wrong_slices
from jaxmem.optim import adam, on_host
from jaxmem.scheduling import Choice
from jaxmem.scheduling.recompute.residuals import Recompute

_LAYERS = 8
_ALLOWED = 1e-3  # of the largest element: roundings in another order
_POLICY = jax.checkpoint_policies.save_and_offload_only_these_names(
    names_which_can_be_saved=[],
    names_which_can_be_offloaded=["input"],
    offload_src="device",
    offload_dst="pinned_host",
)
_KERNELS = {"xla_disable_hlo_passes": COPIES}

Call = tuple[Callable, tuple]  # a step and its arguments
Made = tuple[Call, Call]  # with offload, and without


def jobs() -> Iterator[Job]:
    for name, rows in cases().items():
        yield Job(f"offload: {name}", partial(rows, name), seconds=25, value=1000)


def cases() -> dict[str, Callable[[str, bool], Rows]]:
    return {
        "a policy of JAX": partial(compared, make=policy, ours=False),
        "a policy of JAX, by kernels": partial(compared, make=policy, options=_KERNELS),
        "a policy of JAX, scheduled": partial(
            compared, make=partial(policy, schedule=True)
        ),
        "schedule(offload=True)": partial(compared, make=residuals),
        "on_host": partial(compared, make=moments),
        "adamw(on_host=True)": partial(compared, make=rows_of_moments),
    }


def compared(
    name: str,
    small: bool,
    make: Callable[[bool], Made],
    ours: bool = True,
    options: dict[str, Any] | None = None,
) -> Rows:
    """How far the results are off, and what the program's text says of it.

    The text is left beside those of `seconds`, for a look where the two do not agree.
    """
    (there, args), (here, plain) = make(small)
    # GPUs alone know the option
    options = options if jax.default_backend() == "gpu" else None
    compiled = jax.jit(there).lower(*args).compile(compiler_options=options)
    got, want = (
        jax.tree.leaves(out) for out in (compiled(*args), jax.jit(here)(*plain))
    )
    off = max(map(_off, got, want))
    text = compiled.as_text()
    seconds.left(f"offload {name}", text, [])
    found = wrong_slices(parse_hlo(text))
    # of a program without these copies the lines mean nothing
    said = len(found) if options is None else 0
    right = off <= _ALLOWED
    yield {"right" if ours else "equal": right, "off": off, "wrong slices": said}
    if right == bool(said):
        raise RuntimeError(f"off by {off:.3g}, and {said} slices said to be wrong")
    if ours and not right:
        raise RuntimeError(f"off by {off:.3g}")


def _off(got, want) -> float:
    got, want = (jax.device_get(x).astype(float) for x in (got, want))
    return float(abs(got - want).max() / max(abs(want).max(), 1e-30))


# -- what is compared


def _arrays(small: bool) -> tuple[dict[str, jax.Array], jax.Array]:
    width, rows = (8, 16) if small else (1024, 8192)
    key = jax.random.key(0)
    ws = jax.random.normal(key, (_LAYERS, width, 2 * width)) / width**0.5
    # no two layers alike
    ws *= jnp.linspace(0.5, 1.5, _LAYERS)[:, None, None]
    down = jax.random.normal(jax.random.key(1), (_LAYERS, 2 * width, width))
    x = jax.random.normal(jax.random.key(2), (rows, width))
    return {"up": ws, "down": down / (2 * width) ** 0.5}, x


def _layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"], None


def _named(x, w):
    return _layer(checkpoint_name(x, "input"), w)


def _loss(ws, x, body: Callable = _layer):
    return jnp.square(jax.lax.scan(body, x, ws)[0]).mean()


def policy(small: bool) -> Made:
    """The layers' inputs wait in the host's memory for the backward pass."""
    body = jax.checkpoint(_named, policy=_POLICY, prevent_cse=False)
    there, args = jax.grad(partial(_loss, body=body)), _arrays(small)
    return (there, args), (jax.grad(_loss), args)


def scheduled(small: bool) -> Made:
    """The same, its indices hidden where XLA:GPU takes them for others."""
    (there, args), plain = policy(small)
    return (jaxmem.schedule(there, donate_argnums=()), args), plain


def residuals(small: bool) -> Made:
    """All residuals wait there, as under a budget that nothing else reaches."""
    step, args = jax.grad(_loss), _arrays(small)
    choice = Choice("h100", (Recompute(offload=1),))
    made = jaxmem.schedule(step, donate_argnums=()).rewritten(choice, *args)
    there = lambda *args: jaxprs.evaluate(made.jaxpr, jax.tree.leaves(args))
    return (there, args), (step, args)


def moments(small: bool) -> Made:
    """Adam's moments are fetched a layer at a time, in the backward scan."""
    ws, x = _arrays(small)
    there, here = on_host(optax.adam(1e-3)), optax.adam(1e-3)
    return _update(there, ws, x, True), _update(here, ws, x, False)


def rows_of_moments(small: bool) -> Made:
    """Those of a table are fetched some rows at a time."""
    shape = (4096, 512) if small else (32768, 1024)
    table = {"table": jax.random.normal(jax.random.key(0), shape)}
    x = jax.random.normal(jax.random.key(1), (shape[1],))
    there, here = (adam(1e-3, bits=32, on_host=away) for away in (True, False))
    return _update(there, table, x, False), _update(here, table, x, False)


def _update(tx, ws, x, schedule: bool) -> Call:
    loss = _loss if "up" in ws else lambda ws, x: jnp.square(ws["table"] @ x).mean()

    def step(ws, state, x):
        updates, state = tx.update(jax.grad(loss)(ws, x), state, ws)
        return optax.apply_updates(ws, updates), state

    step = jaxmem.schedule(step, donate_argnums=()) if schedule else step
    # moments that differ from layer to layer, and from row to row
    _, state = jax.jit(step)(ws, tx.init(ws), x)
    return step, (ws, state, x)
