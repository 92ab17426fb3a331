"""Bytes a parameter that optimizers keep, of Llama's sizes, before anything exists.

    python -m benchmarks.ledger

`jaxmem.ledger` of stacked layers, gradients of the layers released, one and eight
micro-batches. Weights are float32, or bfloat16 with a master beside them where a row
says so. Nothing is compiled: `jaxmem.estimate` has the temporaries.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import publish
from jaxmem import optim

MICRO_BATCHES = 8
F32, BF16 = jnp.float32, jnp.bfloat16


class Sizes(NamedTuple):
    """Of a Llama: layers, width, the MLP's, of keys and values, words, tied."""

    layers: int
    width: int
    hidden: int
    of_keys: int
    words: int
    tied: bool = False


MODELS = {
    "Llama-1B": Sizes(16, 2048, 8192, 512, 128_256, tied=True),
    "Llama-7B": Sizes(32, 4096, 11_008, 4096, 32_000),
    "Llama-70B": Sizes(80, 8192, 28_672, 1024, 32_000),
}


def shapes(sizes: Sizes, dtype=F32) -> dict[str, Any]:
    """Parameters of a Llama with scanned layers."""
    n, d, h, kv, words, tied = sizes
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    layers = {
        **{"query": of(n, d, d), "key": of(n, d, kv), "value": of(n, d, kv)},
        **{"out": of(n, d, d), "gate": of(n, d, h), "up": of(n, d, h)},
        "down": of(n, h, d),
    }
    norms = {"norms": {"attention": of(n, d), "mlp": of(n, d)}}
    rest = {"embedding": of(words, d), "norm": of(d)}
    return {
        "layers": layers,
        **norms,
        **rest,
        **({} if tied else {"head": of(d, words)}),
    }


def low_rank(make: Callable, **how: Any) -> Callable:
    """Matrices of the layers alone; the rank is what the scheme is given."""
    return lambda rank: make(1e-2, rank=rank, projected="layers", **how)


CODES = {"bits": 8, "preconditioner_dtype": "int8"}

# name -> (the optimizer of a rank, dtype of the weights)
SCHEMES: dict[str, tuple[Callable[[int], Any], Any]] = {
    "AdamW, float32": (lambda _: optax.adamw(1e-3), F32),
    "AdamA": (lambda _: jaxmem.adama(1e-3), F32),
    "AdamW, 8-bit moments": (lambda _: optim.adamw(1e-3, bits=8), F32),
    "AdamW, 4-bit moments": (lambda _: optim.adamw(1e-3, bits=4), F32),
    "AdamA, 8-bit moments": (lambda _: jaxmem.adama(1e-3, bits=8), F32),
    "AdamW, 8-bit, bfloat16 + 8-bit master": (
        lambda _: optim.split_master(optim.adamw(1e-3, bits=8)), BF16
    ),
    "AdamW, 8-bit, bfloat16, stochastic rounding": (
        lambda _: optim.stochastic_rounding(optim.adamw(1e-3, bits=8)), BF16
    ),
    "AdamW, 8-bit, bfloat16, Kahan": (
        lambda _: optim.kahan_summation(optim.adamw(1e-3, bits=8)), BF16
    ),
    "AdamW, bfloat16, Kahan": (
        lambda _: optim.kahan_summation(optax.adamw(1e-3, mu_dtype=BF16)), BF16
    ),
    "AdamW, moments on the host": (lambda _: optim.on_host(optax.adamw(1e-3)), F32),
    "8-bit AdamW and master on the host, bfloat16": (
        lambda _: optim.on_host(optim.split_master(optim.adamw(1e-3, bits=8))), BF16
    ),
    "Lion": (lambda _: optim.lion(1e-4), F32),
    "Lion, 8-bit": (lambda _: optim.lion(1e-4, bits=8), F32),
    "Lion, 4-bit": (lambda _: optim.lion(1e-4, bits=4), F32),
    "Lion, 8-bit, bfloat16, stochastic rounding": (
        lambda _: optim.stochastic_rounding(optim.lion(1e-4, bits=8)), BF16
    ),
    "Schedule-free AdamW": (lambda _: optim.schedule_free_adamw(1e-3), F32),
    "Schedule-free AdamW, 8-bit": (
        lambda _: optim.schedule_free_adamw(1e-3, bits=8), F32
    ),
    "Schedule-free AdamW, 4-bit": (
        lambda _: optim.schedule_free_adamw(1e-3, bits=4), F32
    ),
    "Schedule-free AdamW, 8-bit, bfloat16, stochastic rounding": (
        lambda _: optim.stochastic_rounding(optim.schedule_free_adamw(1e-3, bits=8)),
        BF16,
    ),
    "GaLore": (low_rank(optim.galore), F32),
    "GaLore, 8-bit, int8 projector, reverse_std, bfloat16": (
        low_rank(
            optim.galore, inner=optim.scale_by_adam(bits=8), projector_dtype="int8",
            projection="reverse_std",
        ), BF16,
    ),
    # as its authors have it: the projection has the type of the gradients
    "GaLore, 8-bit, bfloat16 projector, bfloat16": (
        low_rank(optim.galore.paper), BF16
    ),
    "APOLLO": (low_rank(optim.apollo), F32),
    "APOLLO-Mini": (lambda _: optim.apollo_mini(1e-2, projected="layers"), F32),
    "Fira": (low_rank(optim.fira), F32),
    "CAME": (lambda _: optim.came(1e-3), F32),
    "CAME, 8-bit": (lambda _: optim.came(1e-3, bits=8), F32),
    "Muon": (lambda _: optim.muon(2e-2, stacked="layers"), F32),
    "Muon, 8-bit": (lambda _: optim.muon(2e-2, stacked="layers", bits=8), F32),
    "SOAP": (lambda _: optim.soap(3e-3, stacked="layers"), F32),
    "SOAP, 8-bit": (lambda _: optim.soap(3e-3, stacked="layers", **CODES), F32),
    "SOAP, one-sided, 8-bit": (
        lambda _: optim.soap(3e-3, stacked="layers", one_sided=True, **CODES), F32
    ),
    "Shampoo": (lambda _: optim.shampoo(1e-3, stacked="layers"), F32),
    "Shampoo, 8-bit": (
        lambda _: optim.shampoo(1e-3, stacked="layers", **CODES), F32
    ),
    "Shampoo, one-sided, 8-bit": (
        lambda _: optim.shampoo(1e-3, stacked="layers", one_sided=True, **CODES), F32
    ),
    "Adafactor": (lambda _: optim.adafactor(1e-3), F32),
    "SM3": (lambda _: optim.sm3(1e-3), F32),
    "SM3, 8-bit": (lambda _: optim.sm3(1e-3, bits=8), F32),
    "Adam-mini": (lambda _: optim.adam_mini(1e-3), F32),
    "Adam-mini, 8-bit": (lambda _: optim.adam_mini(1e-3, bits=8), F32),
    "AdaLomo, bfloat16": (lambda _: optim.adalomo(1e-3), BF16),
    "LOMO, bfloat16": (lambda _: optim.lomo(1e-3), BF16),
}  # fmt: skip


def measure(model: str, scheme: str) -> list[Any]:
    sizes, (make, dtype) = MODELS[model], SCHEMES[scheme]
    # a quarter of the width, as in GaLore's paper, where matrices are that large
    rank = min(sizes.width // 4, sizes.of_keys)
    params, tx = shapes(sizes, dtype), make(rank)
    one, many = (
        jaxmem.ledger(params, tx, micro_batches=n, released=["layers", "norms"])
        for n in (1, MICRO_BATCHES)
    )
    parts = [many.bytes_of(part) for part in ("weights", "gradients", "accumulator")]
    parts += [many.bytes_of("moments"), many.bytes_of("masters")]
    cells = [many.per_parameter(x) for x in (*parts, many.device_bytes)]
    return [
        *(model, scheme, *cells, one.per_parameter(one.device_bytes)),
        *(many.per_parameter(many.host_bytes), many.device_bytes / 2**30),
    ]


COLUMNS = (
    *("model", "optimizer", "weights", "gradients", "accumulator", "moments"),
    *("masters", "device B/param", "device, 1 micro-batch", "host B/param"),
    "device (GiB)",
)


if __name__ == "__main__":
    publish("ledger", COLUMNS, [measure(m, s) for m in MODELS for s in SCHEMES])
