"""Lion and schedule-free rules."""

import optax

from jaxmem import optim
from tests.bad_calls.call import COUNT, NOT_NEGATIVE, SHARE, Call
from tests.bad_calls.optimizers import BITS, DECAY, MASK, PARAMS, RATE

LION = {"b1": DECAY, "b2": DECAY, "bits": (None, *BITS)}
AVERAGE = {
    **{"b1": SHARE, "weight_lr_power": NOT_NEGATIVE},
    **{"learning_rate": RATE, "bits": (None, *BITS)},
}
RULE = optim.schedule_free(optax.sgd(0.1), 0.1)
STATE = RULE.init(PARAMS)

CALLS = [
    Call("lion", optim.lion, {"learning_rate": 0.1}, {
        **LION, "learning_rate": RATE, "weight_decay": RATE, "mask": MASK,
    }),
    Call("scale_by_lion", optim.scale_by_lion, {}, LION),
    Call("schedule_free", optim.schedule_free,
        {"base_optimizer": optax.sgd(0.1), "learning_rate": 0.1},
        {**AVERAGE, "base_optimizer": (None, 3, "sgd")}),
    Call("schedule_free_adamw", optim.schedule_free_adamw, {}, {
        **AVERAGE, "b2": DECAY, "eps": NOT_NEGATIVE, "weight_decay": RATE,
        "mask": MASK, "warmup_steps": COUNT,
    }),
    Call("schedule_free_eval_params", optim.schedule_free_eval_params,
        {"state": STATE, "params": PARAMS},
        {"state": (None, 3, PARAMS), "params": ({"w": PARAMS["w"]},)}),
]  # fmt: skip
