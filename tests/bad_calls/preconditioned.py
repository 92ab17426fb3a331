"""SOAP and Shampoo."""

from jaxmem import optim
from tests.bad_calls.call import COUNT, FLAG, INF, NOT_NEGATIVE, NOT_NUMBER, WORD, Call
from tests.bad_calls.optimizers import BITS, DECAY, MASK, RATE

LEAVES = {
    "stacked": (3, 1.0, {"w": "x"}, {"w": None}),
    "weight_dimension_numbers": (3, "w", {"w": 3}, [1.0]),
    "bits": (None, *BITS), "preconditioner_dtype": (None, *WORD, "int4"),
    "precondition_frequency": (None, *COUNT),
}  # fmt: skip
SOAP = LEAVES | {
    "b1": DECAY, "b2": DECAY, "shampoo_beta": DECAY, "eps": NOT_NEGATIVE,
    "max_precond_dim": (None, *COUNT), "one_sided": FLAG,
    "factored": FLAG, "correct_bias": FLAG,
}  # fmt: skip
SHAMPOO = LEAVES | {
    "b1": DECAY, "b2": (*NOT_NUMBER, 0, 1.1, INF), "eps": NOT_NEGATIVE,
    "block_size": (None, *COUNT), "one_sided": FLAG,
    "start_preconditioning_step": COUNT, "grafting": WORD,
    "grafting_b2": DECAY, "grafting_eps": NOT_NEGATIVE,
}  # fmt: skip
TAIL = {"learning_rate": RATE, "weight_decay": RATE, "mask": MASK}

CALLS = [
    Call("scale_by_soap", optim.scale_by_soap, {}, SOAP),
    Call("soap", optim.soap, {"learning_rate": 0.1}, SOAP | TAIL),
    Call("scale_by_shampoo", optim.scale_by_shampoo, {}, SHAMPOO),
    Call("shampoo", optim.shampoo, {"learning_rate": 0.1}, SHAMPOO | TAIL),
]
