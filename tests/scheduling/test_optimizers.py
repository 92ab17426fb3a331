"""Every optimizer's step can be scheduled, whatever it trains; traced, not compiled.

The list is read off `jaxmem.optim`: what returns a gradient transformation is in it.
"""

import inspect
import typing
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxmem
from jaxmem import optim
from jaxmem.optim import rows
from tests.sets import slow_unless

pytestmark = pytest.mark.usefixtures("standard_jax")

RATE = 1e-3
LAYERS, WIDTH = 2, 256
WORDS = 2**21 // WIDTH  # optimizers update a table of so many rows in a loop over them
GIVEN = {"learning_rate": RATE, "tx": optax.adam(RATE), "max_norm": 1.0, "rank": 2}
GIVEN |= {"base_optimizer": optax.sgd(RATE)}
PARTS = "scale_by_"  # of an optimizer that is in the list by its own name


def optimizers() -> dict[str, Callable[[], Any]]:
    found: dict[str, Callable] = {
        "optax_adam": partial(optax.adam, RATE),
        "optax_sgd": partial(optax.sgd, RATE, momentum=0.9),
        "optax_adafactor": partial(optax.adafactor, RATE),
        "FusedAdam": partial(optim.FusedAdam, RATE),
        "MultiSteps": lambda: optim.MultiSteps(optim.adama(RATE), 2),
        "MultiSteps_optax": lambda: optim.MultiSteps(optax.adam(RATE), 2),
    }
    for name in optim.__all__:
        whole = name.removeprefix(PARTS)
        if whole == name or whole not in optim.__all__:
            found |= forms(name)
    return found


def forms(name: str) -> Iterator[tuple[str, Callable[[], Any]]]:
    """An optimizer as its defaults have it, and at each width that it offers."""
    make = getattr(optim, name)
    hints = typing.get_type_hints(make) if inspect.isfunction(make) else {}
    if not issubclass(hints.get("return", object), optax.GradientTransformation):
        return
    given = inspect.signature(make).parameters
    args = {k: GIVEN[k] for k in given if k in GIVEN}
    yield name, partial(make, **args)
    if "bits" in given:
        listed = typing.get_origin(hints["bits"]) is typing.Literal
        for bits in typing.get_args(hints["bits"]) if listed else (8, 4):
            if bits != getattr(given["bits"].default, "bits", given["bits"].default):
                yield f"{name}_{bits}_bits", partial(make, bits=bits, **args)
    if "on_host" in given:
        yield f"{name}_on_host", partial(make, on_host=True, **args)


def layer(x, w):
    return x + jnp.tanh(x @ w["up"]) @ w["down"] + w["b"], None


def scanned(params, x):
    return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0] ** 2)


def unrolled(params, x):
    for w in params["layers"]:
        x, _ = layer(x, w)
    return jnp.mean(x**2)


def looked_up(params, ids):
    return jnp.mean((params["table"][ids] @ params["head"]) ** 2)


def shape(*dims, dtype=jnp.float32):
    return jax.ShapeDtypeStruct(dims, dtype)


def weights(*stacked):
    """With one of 16 bits, which some optimizers ask for."""
    down = shape(*stacked, WIDTH, WIDTH, dtype=jnp.bfloat16)
    up = shape(*stacked, WIDTH, WIDTH)
    return {"b": shape(*stacked, WIDTH), "up": up, "down": down}


X, IDS = shape(8, WIDTH), shape(4, 16, dtype=jnp.int32)
HEAD = shape(WIDTH, 8, dtype=jnp.bfloat16)
TABLE = {"table": shape(WORDS, WIDTH), "head": HEAD}
MODELS: dict[str, Any] = {
    "scanned": (scanned, {"layers": weights(LAYERS)}, X),
    "unrolled": (unrolled, {"layers": [weights() for _ in range(LAYERS)]}, X),
    "table": (looked_up, TABLE, IDS),
    "rows": (looked_up, TABLE, IDS),
}


def updated(tx, grads, state, params):
    if isinstance(tx, optim.FusedAdam):
        return tx.step(grads, state, params)
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


def step_of(name: str, model: str) -> tuple[Callable, tuple[Any, Any]]:
    """The step of an optimizer on a model, and the shapes of its arguments."""
    tx: Any = OPTIMIZERS[name]()
    loss, params, batch = MODELS[model]
    of_rows = model == "rows"
    grad = (
        optim.value_and_row_grad(loss, "table") if of_rows else jax.value_and_grad(loss)
    )

    def step(state, batch):
        params, moments = state
        value, grads = grad(params, batch)
        return updated(tx, grads, moments, params), value

    if isinstance(tx, optim.FusedAdam):
        return step, ((params, jax.eval_shape(tx.init, params)), batch)
    # which says what lies in the host's memory
    return step, ((params, optim.abstract_state(tx, params)), batch)


OPTIMIZERS = optimizers()
OF_ROWS = {n for n in OPTIMIZERS if hasattr(rows, n)}
CASES = [
    (name, model)
    for name in OPTIMIZERS
    for model in (MODELS if name not in OF_ROWS else ["rows"])
    if model != "rows" or name in OF_ROWS
]


# Of each optimizer the scanned layers are in the fast suite; of these the others too.
OF_ALL_MODELS = ("adamw", "came")
# Each is what two others are, and long to trace.
BOTH = ("adama_4_bits", "adamw_4_bits", "adamw_on_host", "apollo_mini")


@pytest.mark.parametrize(
    "donate", [pytest.param((), marks=pytest.mark.slow), (0,)], ids=["kept", "donated"]
)
@pytest.mark.parametrize(
    "name, model",
    [
        pytest.param(name, model, marks=slow_unless(fast))
        for name, model in CASES
        for of_one in [model in ("scanned", "rows") and name not in BOTH]
        for fast in [of_one or name in OF_ALL_MODELS]
    ],
)
def test_its_step_can_be_scheduled(name, model, donate):
    step, args = step_of(name, model)
    plan = jaxmem.schedule(step, donate_argnums=donate).plan(*args)
    of_layers = [g for g in plan.gradients if g.shape[:1] == (LAYERS,)]
    assert len(of_layers) == (3 if model == "scanned" else 0)


def test_none_is_left_out():
    named = {"adama_8_bits", "adam_4_bits", "split_master_16_bits", "adamw_on_host"}
    assert named | {"came", "galore", "on_host", "rowwise"} <= set(OPTIMIZERS)
    assert len(OF_ROWS) == 4
