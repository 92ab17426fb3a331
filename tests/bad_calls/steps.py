"""What takes a train step or makes one."""

import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem import scheduling
from jaxmem.memory import format_bytes, parse_bytes
from tests.arrays import ones
from tests.bad_calls.call import (
    BYTES,
    COUNT,
    DTYPE,
    FLAG,
    FUNCTION,
    FUNCTION_OR_NONE,
    NAMES,
    NOT_NEGATIVE,
    NOT_NUMBER,
    NUMBERS,
    OPTIONS,
    POSITIVE,
    TARGET,
    WORD,
    Call,
)
from tests.bad_calls.optimizers import ADAMA, PARAMS, STATE

X = jax.ShapeDtypeStruct((4, 3), jnp.float32)


def step(w, x):
    return w - jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(w)


def swept(batch):
    return step, (W, jax.ShapeDtypeStruct((batch, 3), jnp.float32))


W = jax.ShapeDtypeStruct((3, 3), jnp.float32)
PLACES = {
    "donate_argnums": (*NUMBERS, 5, -3),
    "donate_argnames": (*NAMES, "z"),
    "static_argnums": (*NUMBERS, 5),
    "static_argnames": (*NAMES, "z"),
}
BATCH = ones((4, 3))
ARRAYS = ones((3, 3)), BATCH
GIB = "1GiB"
OUT_OF_MEMORY = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 9.00GiB."


def loss(params, batch, rng):
    return jnp.mean(batch @ params["w"].T) + jnp.sum(params["b"])


def micro(**changed):
    """One call of a step of `microbatch`."""
    made = jaxmem.microbatch(loss, ADAMA, 2, donate=False)
    good = {"params": PARAMS, "opt_state": STATE, "batch": BATCH, "rng": None}
    return made(*(good | changed).values())


CALLS = [
    Call("microbatch", jaxmem.microbatch, {"loss_fn": loss, "tx": ADAMA, "n": 2}, {
        "loss_fn": FUNCTION, "tx": (None, 3, "adam", optax.adam, STATE),
        "n": (None, *COUNT), "has_aux": FLAG, "has_model_state": FLAG,
        "weight_fn": FUNCTION_OR_NONE, "remat": (None, 3, "all", []),
        "skip_nonfinite": (None, 3, *WORD[:2], ["loss"]), "accumulator_dtype": DTYPE,
        "clip": WORD, "axis_name": (3, (), "", ["x", 1]), "donate": FLAG,
        "tables": (3, ["w", 3], {"w": 1}),
    }),
    Call("microbatch step", micro, {}, {
        "params": (STATE, None, 3, {"w": "x"}), "opt_state": (PARAMS, None, 3),
        "batch": (None, "x", ones((3, 3)), {}),
        "rng": (3, "key", ones(2)),
    }, unchecked=True),
    Call("schedule", jaxmem.schedule, {"step": step}, {
        "step": FUNCTION, "budget": (*BYTES, 0), "target": TARGET,
        "donate_argnums": NUMBERS, "donate_argnames": NAMES,
        "static_argnums": NUMBERS, "static_argnames": NAMES, "clip": WORD,
        "offload": (*FLAG, True), "tile": FLAG,
        "plan": ({}, 3, "plan.json", scheduling.Plan),
        "compiler_options": OPTIONS, "progress": FLAG, "verify": FLAG,
    }),
    Call("Scheduled.plan", lambda **kw: jaxmem.schedule(step).plan(W, X, **kw), {},
        {"target": TARGET}),
    Call("remat_policy",
        lambda fn, budget, **kw: jaxmem.remat_policy(fn, budget, W, X, **kw),
        {"fn": step, "budget": GIB}, {
            "fn": FUNCTION, "budget": (None, *BYTES, 0), "target": TARGET,
            "donate_argnums": NUMBERS, "progress": FLAG,
        }, unchecked=True),
    Call("predict", lambda fn, **kw: scheduling.predict(fn, W, X, **kw),
        {"fn": step}, {
            "fn": FUNCTION, "target": (None, *TARGET), "donate_argnums": NUMBERS,
        }),
    Call("estimate", lambda fn, **kw: jaxmem.estimate(fn, W, X, **kw), {"fn": step}, {
        "fn": FUNCTION, "target": TARGET, **PLACES, "timeout": (None, *POSITIVE),
        "compiler_options": OPTIONS, "cache": FLAG,
    }, unchecked=True),
    Call("lint", lambda step, **kw: jaxmem.lint(step, W, X, **kw), {"step": step}, {
        "step": FUNCTION, "target": TARGET, **PLACES, "timeout": (None, *POSITIVE),
    }),
    Call("diff", jaxmem.diff, {"a": (step, (W, X)), "b": (step, (W, X))}, {
        "a": (None, 3, [], step, (step,), (step, W), "banana", "no_such.json"),
        "b": (None, 3, [], step, (step,), (step, W), "banana", "no_such.json"),
        "target": TARGET, "commit_a": (3, "x", []), "commit_b": (3, "x", []),
        "python_a": (3, "x", []), "python_b": (3, "x", []),
        "reduce": (3, [], "", "growth.txt"), "timeout": (None, *POSITIVE),
        "reduce_seconds": (None, *POSITIVE),
    }),
    Call("assert_memory", lambda step, **kw: jaxmem.testing.assert_memory(
        step, W, X, **kw), {"step": step, "max_bytes": "1GiB"}, {
        "step": FUNCTION, "max_bytes": (None, *BYTES), "max_ms": POSITIVE,
        "baseline": (3, [], "", "base.txt"), "max_growth": NOT_NEGATIVE,
        "update": FLAG, "target": TARGET,
    }),
    Call("explain", jaxmem.explain, {"error": OUT_OF_MEMORY}, {
        "error": (None, 3, [], "", "Loss: nan", pathlib.Path("no_such.log")),
        "step": FUNCTION_OR_NONE, "target": TARGET,
    }),
    Call("explained", lambda **kw: jaxmem.explained(**kw).__enter__(), {}, {
        "named": FUNCTION_OR_NONE, "target": TARGET,
    }),
    Call("live_arrays", jaxmem.live_arrays, {"params": BATCH}, {
        "params": ("w", 3, [1, 2], {"w": 1.5}, np.ones(3), X),
    }),
    Call("monitor", lambda **kw: jaxmem.monitor(**kw), {"live": True}, {
        "predicted": (True, "", "banana", -1, [], X), "every": (None, *COUNT),
        "log_to": (None, 3, True, "", "memory.txt", "no_such_folder/memory.jsonl",
                   [None]),
        "live": (1, "yes", []), "device": ("gpu", 0, []),
    }),
    Call("audit", lambda step, **kw: jaxmem.audit(step, W, X, **kw), {"step": step}, {
        "step": FUNCTION, "target": TARGET, **PLACES, "timeout": (None, *POSITIVE),
    }),
    Call("check", lambda step, **kw: jaxmem.check(step, step, *ARRAYS, **kw),
        {"step": step}, {
            "step": FUNCTION, "steps": (None, *COUNT), "carry": (*NUMBERS[:2], "w"),
            "static_argnums": PLACES["static_argnums"],
            "static_argnames": PLACES["static_argnames"],
        }, unchecked=True),
    Call("advise", lambda fn, **kw: jaxmem.advise(fn, W, X, **kw),
        {"fn": step, "budget": GIB}, {
            "fn": FUNCTION, "target": TARGET, "budget": (*BYTES, 0), **PLACES,
            "tx": (3, "adam"), "allow": (3, "bits", ("moments", "bits")),
            "every": FLAG, "progress": FLAG,
        }),
    Call("max_batch", jaxmem.max_batch,
        {"fn": step, "make_args": lambda n: (W, X), "memory": GIB}, {
            "fn": FUNCTION, "make_args": FUNCTION, "target": TARGET,
            "memory": (*BYTES, 0), "multiple_of": (None, *COUNT),
            "limit": (None, *COUNT), "progress": FLAG,
        }, unchecked=True),
    Call("sweep", jaxmem.sweep, {"make": swept, "over": {"batch": [2]}},
         bad={"make": FUNCTION, "over": ({}, [2], {"batch": []}, {"rows": [2]}),
              "target": ("h1000", 3, []), "progress": FLAG}),
    Call("best_batch", jaxmem.best_batch,
        {"fn": step, "make_args": lambda n: (W, X), "target": "h100", "memory": GIB}, {
            "fn": FUNCTION, "make_args": FUNCTION, "target": TARGET,
            "memory": (*BYTES, 0), "multiple_of": (None, *COUNT),
            "limit": (None, *COUNT), "progress": FLAG,
        }, unchecked=True),
    Call("residuals", lambda fn, **kw: jaxmem.residuals(fn, W, X, **kw),
        {"fn": lambda w, x: jnp.sum(x @ w)}, {
            "fn": FUNCTION, "argnums": (*NUMBERS, 2, -3, ()),
        }),
    Call("target_mesh", jaxmem.target_mesh,
        {"target": "h100", "shape": (2,), "axis_names": ("data",)}, {
            "target": TARGET, "shape": (None, (), (0,), (1.5,), "2", (9,), 1.5),
            "axis_names": (None, (), (3,), ("a", "b"), ("",), 3),
            "axis_types": ("Auto", 3, ("Auto",), ()),
        }),
    Call("format_bytes", format_bytes, {"count": 3}, {"count": (None, *NOT_NUMBER)}),
    Call("parse_bytes", parse_bytes, {"text": 3}, {"text": (None, *BYTES)}),
]  # fmt: skip
