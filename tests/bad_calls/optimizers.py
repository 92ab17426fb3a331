"""Optimizers and trained parts."""

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
from jaxmem import optim
from tests.arrays import ones
from tests.bad_calls.call import (
    ARRAY,
    COUNT,
    DTYPE,
    FLAG,
    FUNCTION,
    INF,
    NAN,
    NOT_INT,
    NOT_NEGATIVE,
    NOT_NUMBER,
    POSITIVE,
    WORD,
    Call,
)

PARAMS = {"w": ones((2, 3)), "b": ones(3)}
ADAMA = optim.adama(0.1)
ADAM = optax.adam(0.1)
STATE = ADAMA.init(PARAMS)
MOMENTS = optim.scale_by_adama()
FUSED = optim.FusedAdam(0.1)
MULTI = optim.MultiSteps(ADAMA, 2)
PART = jaxmem.trainable(PARAMS, "w")

DECAY = (*NOT_NUMBER, 1, -0.1, INF)
RULE = {
    "b1": DECAY,
    "b2": DECAY,
    "eps": NOT_NEGATIVE,
    "eps_root": NOT_NEGATIVE,
    "mu_dtype": DTYPE,
    "nu_dtype": DTYPE,
}
EACH = {name: RULE[name] for name in ("b1", "b2", "eps", "eps_root")}
SEED = (None, -1, 2**32, 2.5)
MODES = {
    "micro_batches": (None, *COUNT, ones((2,), jnp.int32), jnp.float32(2.0)),
    "mode": (None, *WORD),
    "v_scale": (None, *WORD),
    "nesterov": FLAG,
    "axis_name": (3, (), "", ["data", 3], {"data": 1}),
}
BITS = (7, True, "8", 8.0, ARRAY)
RATE = ("fast", None, True, [0.1], NAN, {}, ARRAY)
TREE = (None, 3, "x")  # for a state
OTHER = {"w": PARAMS["w"]}  # lacks a parameter
UPDATE = {"updates": (STATE, OTHER), "state": (*TREE, PARAMS, ADAM.init(PARAMS))}
MASK = (3, "w", {"w": 1, "b": True}, {"w": None, "b": True}, [2.0])
ACCUMULATOR = {"initial_accumulator_value": NOT_NEGATIVE, "eps": NOT_NEGATIVE}

PROJECTED = (3, 1.0, {"w": "x"}, {"w": None})
SUBSPACE = {
    "rank": COUNT, "gap": (*COUNT, 2**30), "scale": POSITIVE, "projection": WORD,
    "subspace": WORD, "iterations": COUNT, "projector_dtype": (None, *WORD),
    "lazy": FLAG, "projected": PROJECTED, "seed": NOT_INT,
}  # fmt: skip
GALORE = {
    **SUBSPACE, "inner": (3, "adam", optax.adam), "eps_placement": (None, *WORD),
    "micro_batches": COUNT,
}  # fmt: skip
LENGTHS = {
    "b1": DECAY, "b2": DECAY, "eps": NOT_NEGATIVE, "growth": (*NOT_NUMBER, 0.99),
    "projected": PROJECTED, "seed": NOT_INT,
}  # fmt: skip
FIRA = {**SUBSPACE, **LENGTHS, "projection": (*WORD, "full")}
APOLLO = {
    "rank": COUNT, "gap": COUNT, "scale": POSITIVE, "scaling": (None, *WORD), **LENGTHS,
}  # fmt: skip
GALORED = optim.scale_by_galore(2)

CALLS = [
    Call("adama", optim.adama, {"learning_rate": 0.1}, {
        "learning_rate": RATE, **RULE, **MODES, "weight_decay": RATE, "mask": MASK,
    }),
    Call("scale_by_adama", optim.scale_by_adama, {}, {**RULE, **MODES}),
    Call("galore", optim.galore, {"learning_rate": 0.1}, {
        "learning_rate": RATE, **GALORE, "weight_decay": RATE, "mask": MASK,
    }),
    Call("galore.paper", optim.galore.paper, {"learning_rate": 0.1}, {
        **{name: GALORE[name] for name in ("rank", "gap", "scale", "projected")},
        "learning_rate": RATE, "bits": BITS, "micro_batches": COUNT,
        "weight_decay": RATE, "mask": MASK,
    }),
    Call("scale_by_galore", optim.scale_by_galore, {}, GALORE),
    Call("scale_by_galore(full)", optim.scale_by_galore, {"projection": "full"},
        {"lazy": (True,)}),
    Call("scale_by_galore(inner)", optim.scale_by_galore, {"inner": ADAM},
        {"eps_placement": ("reference",)}),
    Call("fira", optim.fira, {"learning_rate": 0.1}, {
        "learning_rate": RATE, **FIRA, "weight_decay": RATE, "mask": MASK,
    }),
    Call("scale_by_fira", optim.scale_by_fira, {}, FIRA),
    Call("apollo", optim.apollo, {"learning_rate": 0.1}, {
        "learning_rate": RATE, **APOLLO, "weight_decay": RATE, "mask": MASK,
    }),
    Call("scale_by_apollo", optim.scale_by_apollo, {}, APOLLO),
    Call("apollo_mini", optim.apollo_mini, {"learning_rate": 0.1}, {
        "learning_rate": RATE, "gap": COUNT, "scale": POSITIVE, **LENGTHS,
        "weight_decay": RATE, "mask": MASK,
    }),
    Call("galore.update", GALORED.update,
        {"updates": PARAMS, "state": GALORED.init(PARAMS), "params": PARAMS},
        {"updates": (OTHER,), "state": (*TREE, PARAMS, STATE)}, trace=True),
    Call("FusedAdam", optim.FusedAdam, {"learning_rate": 0.1}, {
        "learning_rate": RATE, **RULE, "weight_decay": RATE, "mask": MASK,
        "implementation": ("banana", "", 3, True, ["xla"]),
    }),
    Call("MultiSteps", optim.MultiSteps, {"opt": ADAMA, "every_k_schedule": 2}, {
        "opt": (None, 3, "adam", optax.adam), "every_k_schedule": (None, *COUNT),
        "use_grad_mean": FLAG, "accumulator_dtype": DTYPE,
    }),
    Call("on_host", optim.on_host, {"tx": ADAM}, {"tx": (None, 3, "adam", optax.adam)}),
    Call("abstract_state", optim.abstract_state, {"tx": ADAM, "params": PARAMS}, {
        "tx": (None, 3, "adam", optax.adam),
    }),
    Call("ledger", jaxmem.ledger, {"params": PARAMS, "tx": ADAM}, {
        "params": (None, 3, {}, {"w": ones(2, jnp.int32)}),
        "tx": (None, 3, "adam", optax.adam), "micro_batches": COUNT,
        "released": (3, "banana", ["w", 3]), "gradient_dtype": DTYPE,
        "accumulator_dtype": DTYPE,
    }),
    Call("Ledger.bytes_of", jaxmem.ledger(PARAMS, ADAM).bytes_of,
        {"part": "weights"}, {"part": (None, *WORD)}),
    Call("clip_by_layer_norm", optim.clip_by_layer_norm, {"max_norm": 1.0}, {
        "max_norm": (None, *POSITIVE), "stacked": (3, 1.0, {"w": "x"}, {"w": None}),
    }),
    Call("choose_codes", optim.choose_codes, {"gradients": [PARAMS] * 4}, {
        "gradients": (None, 3, PARAMS, [], [PARAMS] * 3, [*[PARAMS] * 3, OTHER],
            [{"w": ones(2, jnp.int32)}] * 4), "bits": (*BITS, 32),
        "codes": (3, [], "float8", ["float8", "banana"], ["mxfp4"]),
    }),
    Call("LowBit", optim.LowBit, {}, {
        "bits": (None, *BITS), "code": ("linear", "", 3), "block": (1, *COUNT),
        "least_size": (None, -1, 2.5, "4"), "stochastic": ("yes", 1, 0.5),
        "seed": SEED, "by_rows": FLAG,
    }),
    *(Call(name, getattr(optim, name), {"learning_rate": 0.1}, {
        "learning_rate": RATE, **EACH, "bits": (None, *BITS), "nesterov": FLAG, **more,
    }) for name, more in (
        ("adam", {}), ("adamw", {"weight_decay": RATE, "mask": MASK}),
    )),
    Call("scale_by_adam", optim.scale_by_adam, {}, {**EACH, "bits": (None, *BITS)}),
    Call("adama+bits", optim.adama, {"learning_rate": 0.1}, {"bits": BITS}),
    *(Call(name, getattr(optim, name), {"tx": ADAM}, {
        "tx": (None, 3, "adam", optax.adam), **more,
    }) for name, more in (
        ("stochastic_rounding", {"seed": SEED}), ("kahan_summation", {}),
        ("split_master", {"bits": (4, None, "8", True), "stochastic": FLAG,
                          "seed": SEED}),
    )),
    Call("adama.update", ADAMA.update,
        {"updates": PARAMS, "state": STATE, "params": PARAMS}, UPDATE, trace=True),
    Call("scale_by_adama.update", MOMENTS.update,
        {"updates": PARAMS, "state": MOMENTS.init(PARAMS), "params": PARAMS}, {
            **UPDATE, "phase": WORD, "micro_batches": COUNT,
            "weight": ("1", True, ARRAY, [1.0]), "keep": ("yes", 1, ARRAY > 0, 1.0),
        }, trace=True),
    Call("MultiSteps.update", MULTI.update,
        {"updates": PARAMS, "state": MULTI.init(PARAMS), "params": PARAMS},
        {"state": (*TREE, PARAMS, STATE)}, trace=True),
    Call("accumulate_step", optim.accumulate_step,
        {"tx": ADAMA, "grads": PARAMS, "state": STATE, "params": PARAMS,
         "micro_batches": 2}, {
            "tx": (None, 3, "adam", optim.adama), "grads": (STATE, OTHER),
            "state": (*TREE, PARAMS, ADAM.init(PARAMS)),
            "micro_batches": (None, *COUNT),
        }, trace=True),
    Call("apply_step", optim.apply_step,
        {"tx": ADAMA, "state": STATE, "params": PARAMS}, {
            "tx": (None, 3, "adam", optim.adama),
            "state": (*TREE, PARAMS, ADAM.init(PARAMS)), "params": (STATE, OTHER),
        }, trace=True),
    Call("start_step", lambda **kwargs: jax.vmap(
            lambda _: optim.start_step(**kwargs), axis_name="data")(ones(2)),
        {"state": STATE, "params": PARAMS, "axis_name": "data"}, {
            "state": (*TREE, PARAMS, ADAM.init(PARAMS)),
            "axis_name": (None, 3, (), "", "other"),
        }, trace=True),
    Call("FusedAdam.init", FUSED.init, {"params": PARAMS}, {
        "params": ({"w": ones(2, jnp.int32)}, {"w": "x"}),
    }, trace=True),
    Call("FusedAdam.step", FUSED.step,
        {"grads": PARAMS, "state": FUSED.init(PARAMS), "params": PARAMS}, {
            "grads": (None, STATE, OTHER), "state": (*TREE, PARAMS, STATE),
            "params": (None, STATE, OTHER), "micro_batches": (None, *COUNT),
            "weight": ("1", True, ARRAY), "rng": (3, "key", ones(2)),
        }, trace=True),
    Call("FusedAdam.accumulate", FUSED.accumulate,
        {"grads": PARAMS, "state": FUSED.init(PARAMS), "micro_batches": 2}, {
            "grads": (None, STATE, OTHER), "state": (*TREE, PARAMS, STATE),
            "micro_batches": (None, *COUNT), "weight": ("1", True, ARRAY),
        }, trace=True),
    Call("FusedAdam.apply", FUSED.apply,
        {"state": FUSED.init(PARAMS), "params": PARAMS}, {
            "state": (*TREE, PARAMS, STATE), "params": (None, STATE, OTHER),
            "rng": (3, "key", ones(2)),
        }, trace=True),
    Call("RowGradients", optim.RowGradients,
        {"ids": jnp.array([1]), "rows": ones((1, 3)), "shape": (2, 3)}, {
            "ids": (None, "x", [1], ones(1), jnp.array([[1]])),
            "rows": (None, 3, [1.0], ones((2, 3)), ones((1, 2))),
            "shape": (None, "x", 1.5, (), (2, 4), [True]),
        }),
    Call("value_and_row_grad", lambda params, **kwargs: optim.value_and_row_grad(
            lambda p: jnp.sum(p["w"][jnp.array([0])]), **kwargs)(params),
        {"params": PARAMS, "tables": "w"}, {
            "tables": (None, 3, "x/y", [], {"w": 1, "b": True}), "has_aux": FLAG,
        }, trace=True),
    Call("value_and_row_grad of a function", optim.value_and_row_grad,
        {"loss_fn": len, "tables": "w"}, {"loss_fn": FUNCTION}),
    Call("rowwise", optim.rowwise, {"tx": ADAM}, {"tx": (None, 3, "adam", optax.adam)}),
    Call("lazy_adam", optim.lazy_adam, {"learning_rate": 0.1}, {
        "learning_rate": RATE, **{k: RULE[k] for k in ("b1", "b2", "eps", "eps_root")},
        "mu_dtype": DTYPE,
    }),
    Call("rowwise_sgd", optim.rowwise_sgd, {"learning_rate": 0.1},
        {"learning_rate": RATE}),
    Call("rowwise_adagrad", optim.rowwise_adagrad, {"learning_rate": 0.1},
        {"learning_rate": RATE, **ACCUMULATOR}),
    Call("scale_by_rowwise_adagrad", optim.scale_by_rowwise_adagrad, {}, ACCUMULATOR),
    Call("trainable", jaxmem.trainable, {"params": PARAMS, "mask": "w"}, {
        "params": (None, 3, {}, {"w": "x"}, {"w": np.arange(3)}),
        "mask": (None, 3, [], "", "x/y", {"w": 1, "b": True}, {"w": True}),
    }),
    Call("value_and_grad", jaxmem.value_and_grad, {"loss_fn": len}, {
        "loss_fn": FUNCTION, "has_aux": FLAG,
    }),
    Call("Frozen.merge", PART.frozen.merge, {"params": PART.params}, {
        "params": (None, PARAMS, {"w": ones((3, 2)), "b": None}),
    }, trace=True),
]  # fmt: skip
