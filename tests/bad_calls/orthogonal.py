"""Muon."""

from jaxmem import optim
from tests.bad_calls.call import DTYPE, FLAG, INF, NOT_NEGATIVE, POSITIVE, WORD, Call
from tests.bad_calls.optimizers import BITS, DECAY, MASK, RATE

CALLS = [
    Call("muon", optim.muon, {"learning_rate": 0.1}, {
        "learning_rate": RATE, "weight_decay": RATE, "weight_decay_mask": MASK,
        "ns_coeffs": (None, 3, "banana", (1.0, 2.0), ((1.0, 2.0, 3.0),) * 2,
            (INF,) * 3),
        "ns_steps": (None, 0, 2.5, "5"), "beta": DECAY, "eps": NOT_NEGATIVE,
        "mu_dtype": DTYPE, "nesterov": FLAG, "adaptive": FLAG,
        "preconditioning": (None, *WORD), "adam_b1": DECAY, "adam_b2": DECAY,
        "adam_eps_root": NOT_NEGATIVE, "adam_weight_decay": RATE,
        "adam_learning_rate": tuple(x for x in RATE if x is not None),
        "muon_weight_dimension_numbers": (3, "w", {"w": 3}, [1.0]),
        "consistent_rms": POSITIVE, "stacked": (3, 1.0, {"w": "x"}, {"w": None}),
        "bits": (None, *BITS), "gram": FLAG, "deal": FLAG,
        "shardings": (3, "w", {"w": 3}),
    }),
]  # fmt: skip
