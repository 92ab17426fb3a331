"""Flax drop-ins: what they have beside Flax's own arguments."""

from flax import nnx as flax_nnx

from jaxmem.nn import linen, nnx
from tests.bad_calls.call import (
    COUNT,
    DTYPE,
    FUNCTION,
    INF,
    NAN,
    POSITIVE,
    SHARE,
    WORD,
    Call,
)

BITS = (0, 9, 1.5, True, "x")
NORM = {"save": (None, 0, 9, 1.5, True, "banana", "", [])}
MS = {"save": (*NORM["save"], "input")}
ABN = {"activation": (None, *WORD, "relu"), "negative_slope": (None, *POSITIVE)}
ABN |= {"alpha": (None, *POSITIVE), "approximate": (None, 3, "tanh")}
SAMPLED = {"budget": (None, *SHARE, 0), "method": (None, *WORD)}
SAMPLED |= {"norm_cache": ("x", 1.5, True, 0, -1, (), (2, 0), (2, "x"), {})}
VELORA = {"groups": (None, *COUNT), "scale": (None, "x", True, NAN, INF, [1.0])}
VELORA |= {"method": (None, *WORD), "decay": (None, *SHARE, 1)}
MESA = {"groups": (None, *COUNT), "bits": (None, *BITS), "decay": (None, *SHARE, 1)}
LORA = {"rank": (None, *COUNT), "alpha": ("x", True, NAN, INF, [1.0])}
MEMORY = {"num_keys": (None, *COUNT), "features": COUNT, "heads": (None, *COUNT)}
MEMORY |= {"k": (None, *COUNT, 9), "key_features": (None, *COUNT, 3)}
MEMORY |= {"gated": (None, 3, "x"), "query_norm": (3, "x")}
TIERS = {"reduction": (None, *COUNT), "dtype": DTYPE, "param_dtype": DTYPE}
TIERS |= {"gate_init": FUNCTION}
REVERSIBLE = {"length": (None, *COUNT), "stream_dtype": DTYPE}
RNGS = flax_nnx.Rngs(0)


def _nnx_dense(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


LINEN = [
    (linen.LayerNorm, {}, NORM),
    (linen.RMSNorm, {}, NORM),
    (linen.MSLayerNorm, {}, MS),
    (linen.MSRMSNorm, {}, MS),
    (linen.InPlaceABN, {}, ABN),
    (linen.Dense, {"features": 2}, {"save": BITS}),
    (linen.DenseGeneral, {"features": 2}, {"save": BITS}),
    (linen.Conv, {"features": 2, "kernel_size": (2, 2)}, {"save": BITS}),
    (linen.MultiHeadAttention, {"num_heads": 2}, {"save": BITS}),
    (linen.MultiHeadDotProductAttention, {"num_heads": 2}, {"save": BITS}),
    (linen.SelfAttention, {"num_heads": 2}, {"save": BITS}),
    (linen.SampledDense, {"features": 2}, SAMPLED),
    (linen.VeLoRADense, {"features": 2}, VELORA),
    (linen.MesaDense, {"features": 2}, MESA),
    (linen.LoRADense, {"features": 2}, LORA),
    (linen.ProductKeyMemory, {"num_keys": 8, "k": 2, "key_features": 4}, MEMORY),
    (linen.MultiTierAdapter, {}, TIERS),
    (linen.Reversible, {"f": linen.Dense(2), "g": linen.Dense(2), "length": 2},
        {"f": FUNCTION, "g": FUNCTION, **REVERSIBLE}),
]  # fmt: skip
NNX = [
    (nnx.LayerNorm, {"num_features": 4}, NORM),
    (nnx.RMSNorm, {"num_features": 4}, NORM),
    (nnx.MSLayerNorm, {"num_features": 4}, MS),
    (nnx.MSRMSNorm, {"num_features": 4}, MS),
    (nnx.InPlaceABN, {"num_features": 4}, ABN),
    (nnx.Linear, {"in_features": 4, "out_features": 4}, {"save": BITS}),
    (nnx.LinearGeneral, {"in_features": 4, "out_features": 4}, {"save": BITS}),
    (nnx.Conv, {"in_features": 4, "out_features": 4, "kernel_size": (2,)},
        {"save": BITS}),
    (nnx.MultiHeadAttention, {"num_heads": 2, "in_features": 4}, {"save": BITS}),
    (nnx.SampledDense, {"in_features": 4, "out_features": 4}, SAMPLED),
    (nnx.VeLoRADense, {"in_features": 32, "out_features": 4}, VELORA),
    (nnx.MesaDense, {"in_features": 32, "out_features": 4}, MESA),
    (nnx.ProductKeyMemory,
        {"in_features": 4, "num_keys": 8, "k": 2, "key_features": 4},
        {**MEMORY, "in_features": (None, *COUNT), "use_values": (None, 3, "x")}),
    (nnx.MultiTierAdapter, {"in_features": 4, "tiers": 2},
        {**TIERS, "in_features": (None, *COUNT), "tiers": (None, *COUNT, 1)}),
    (nnx.Reversible, {"f": _nnx_dense, "g": _nnx_dense, "length": 2},
        {"f": FUNCTION, "g": FUNCTION, **REVERSIBLE}),
]  # fmt: skip

CALLS = [
    *(Call(f"linen.{cls.__name__}", cls, good, bad) for cls, good, bad in LINEN),
    *(Call(f"nnx.{cls.__name__}", cls, {"rngs": RNGS, **good}, bad)
        for cls, good, bad in NNX),
]  # fmt: skip
