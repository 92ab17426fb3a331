"""Factored and layer-wise optimizers."""

import jax.numpy as jnp

from jaxmem import optim
from tests.arrays import ones
from tests.bad_calls.call import (
    ARRAY,
    DTYPE,
    FLAG,
    INF,
    NOT_NEGATIVE,
    POSITIVE,
    Call,
)
from tests.bad_calls.optimizers import BITS, DECAY, MASK, PARAMS, RATE

LAYERS = {"stacked": (3, 1.0, {"w": "x"}, {"w": None}), "per_layer": FLAG}
STACKED = {"stacked": LAYERS["stacked"]}
TAIL = {"learning_rate": RATE, "weight_decay": RATE, "mask": MASK}
PAIR = (None, 3, 1e-30, (1e-30,), (1e-30, -1.0), ("x", 1e-3), (1e-3, 1e-3, 1e-3))
CAME = {
    **{"b1": DECAY, "b2": DECAY, "b3": DECAY, "eps": PAIR},
    **{"clip_threshold": (None, *POSITIVE), "bits": (None, *BITS), **LAYERS},
}
MINI = {
    **{"b1": DECAY, "b2": DECAY, "eps": NOT_NEGATIVE, **STACKED},
    **{"full": LAYERS["stacked"], "bits": (None, *BITS)},
    "blocks": (3, "w", [1], {3: (1, -1)}, {"w": "x"}, {"w": (0, 1)}, {"w": (1, -2)}),
}
FACTORED = {"factored": FLAG, "min_dim_size_to_factor": (None, -1, 1.5, "8", [8])}
RATES = tuple(x for x in RATE if x is not None)


def use(tx):
    """Its updates and state."""
    return tx.update(PARAMS, tx.init(PARAMS), PARAMS)


CALLS = [
    Call("came", optim.came, {"learning_rate": 0.1}, {**CAME, **TAIL}),
    Call("scale_by_came", optim.scale_by_came, {}, CAME),
    Call("adalomo", optim.adalomo, {}, {
        **TAIL, **LAYERS, "eps": PAIR, "clip_threshold": (None, *POSITIVE),
        "decay_rate": (None, "x", True, 0, 0.8, -INF),
    }),
    Call("lomo", optim.lomo, {"learning_rate": 0.1}, {**TAIL, "clip_value": POSITIVE}),
    Call("adafactor", optim.adafactor, {}, {
        **FACTORED, **LAYERS, "learning_rate": RATES, "decay_rate": POSITIVE,
        "decay_offset": ("1", True, ARRAY), "multiply_by_parameter_scale": FLAG,
        "clipping_threshold": POSITIVE, "momentum": DECAY, "eps": NOT_NEGATIVE,
        "weight_decay_rate": RATES,
    }),
    Call("adafactor with momentum", optim.adafactor, {"momentum": 0.9}, {
        "dtype_momentum": DTYPE,
    }),
    Call("adafactor with decay", optim.adafactor, {"weight_decay_rate": 0.1}, {
        "weight_decay_mask": MASK,
    }),
    Call("scale_by_factored_rms", optim.scale_by_factored_rms, {}, {
        **FACTORED, **STACKED, "decay_rate": POSITIVE, "epsilon": NOT_NEGATIVE,
        "step_offset": ("1", True, ARRAY),
    }),
    Call("sm3", optim.sm3, {"learning_rate": 0.1}, {
        **STACKED, "learning_rate": RATE, "momentum": DECAY, "bits": (None, *BITS),
    }),
    Call("scale_by_sm3", optim.scale_by_sm3, {}, {
        **STACKED, "b1": DECAY, "b2": (None, *POSITIVE, 1.1), "eps": NOT_NEGATIVE,
        "bits": (None, *BITS),
    }),
    Call("adam_mini", optim.adam_mini, {"learning_rate": 0.1}, {**MINI, **TAIL}),
    Call("scale_by_adam_mini", optim.scale_by_adam_mini, {}, MINI),
    Call("adam_mini of these parameters",
        lambda blocks: use(optim.scale_by_adam_mini(blocks=blocks)),
        {"blocks": {"w": (1, -1)}},
        {"blocks": ({"w": (1, 2)}, {"w": (1,)}, {"banana": (1, -1)})}, trace=True),
    Call("came of these parameters",
        lambda params: optim.scale_by_came().init(params), {"params": PARAMS},
        {"params": ({"w": ones(2, jnp.int32)}, {"w": "x"})}, trace=True),
]  # fmt: skip
