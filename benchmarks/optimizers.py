"""Optimizers of little state, beside what their papers published.

    python -m benchmarks.optimizers            # every row
    python -m benchmarks.optimizers LOMO h100  # rows that have both; others stay

"GPT-2 medium": one sequence of 1,024 tokens, all in float32, dropout 0.1 (CAME, arXiv
2307.02047). "LLaMA-7B": 8 sequences of 512 tokens, bfloat16 parameters and
compute (LOMO, arXiv 2306.09782), with a checkpoint a layer or without; its
AdamW has a float32 master, ours has float32 parameters. The papers measured PyTorch's
allocator; ours is the compiler's peak. GiB, also where the paper writes GB: its 12.55
for the 6.74e9 parameters in bfloat16 are 13.48e9 bytes.
"""

import functools
import sys

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import MS, compiled_with_ms, publish_some
from benchmarks.models import zoo
from benchmarks.models.transformers import StackConfig
from benchmarks.models.zoo_transformers import GPT2, Llama
from jaxmem import optim

GIB = 2**10  # MiB
GPT2_MEDIUM = StackConfig(24, 1024, 16, 16, 4096, dtype=jnp.float32)
LLAMA_7B = StackConfig(32, 4096, 32, 32, 11008, dropout=0.0)
CHECKPOINT, LEAN = ", a checkpoint a layer", ", substituted"


def gpt2():
    return GPT2(GPT2_MEDIUM, scanned=True), jax.ShapeDtypeStruct((1, 1024), jnp.int32)


def llama():
    model = Llama(LLAMA_7B, scanned=True, vocabulary=32000)
    return model, jax.ShapeDtypeStruct((8, 512), jnp.int32)


def narrow(params):
    """The parameters in bfloat16."""
    kind = lambda p: jax.ShapeDtypeStruct(p.shape, jnp.bfloat16)
    return jax.tree.map(kind, params)


def step_of(name: str, tx, remat: bool = False, lean: bool = False):
    """A train step as a user writes it, and its arguments; lean: substituted."""
    model, tokens = gpt2() if name.startswith("GPT-2") else llama()
    if remat:
        model = model.clone(layer=nn.remat(model.layer))
    is_llama = isinstance(model, Llama)
    if lean:
        model = jaxmem.substitute(model)
    (params, statistics, _), logits = zoo.abstract(model, tokens, optax.identity())
    if is_llama and tx is not ADAMW:
        params = narrow(params)
    state = params, statistics, jax.eval_shape(tx.init, params)
    labels = jax.ShapeDtypeStruct(logits.shape[:-1], jnp.int32)
    return zoo.train_step(model, tx), (state, tokens, labels, zoo.KEY)


def peak(name, tx, target, remat=False, scheduled=False, lean=False):
    """GiB and predicted milliseconds, or why there are none."""
    step, args = step_of(name, tx, remat, lean)
    wrap = jaxmem.schedule if scheduled else jax.jit
    step = wrap(step, donate_argnums=0)
    found, ms = compiled_with_ms(step, *args, target=target, what="peak_bytes")
    return found if isinstance(found, str) else found / GIB, ms


# Layers are those of the one scan; attention kernels have three axes in each.
STACKED = "layers"
MATRICES = ["layers/gate", "layers/up", "layers/down", "head"]
ADAM, CAME = optax.adam(1e-4), optim.came(1e-4, stacked=STACKED)
ADAMW, LOMO = optax.adamw(1e-4), optim.lomo(1e-3)
ADALOMO = optim.adalomo(1e-3, stacked=STACKED)
# Rank and projection of the paper's 7B. Kernels of attention have heads of their own.
GALORE = optim.galore(
    1e-2,
    rank=1024,
    projection="reverse_std",
    projector_dtype="int8",
    projected=MATRICES,
    inner=optim.scale_by_adam(bits=8),
)

GPT, LLM = "GPT-2 medium, 1 x 1024", "LLaMA-7B, 8 x 512"
# (model, how, target) -> (optimizer, remat, scheduled, what the paper has)
PUBLISHED = {
    (GPT, "Adam", "a100"): (ADAM, False, False, 8.77),
    (GPT, "CAME", "a100"): (CAME, False, False, 7.44),
    (GPT, f"CAME{LEAN}", "a100"): (CAME, False, False, 7.44),
    (GPT, "Adam, scheduled", "a100"): (ADAM, False, True, 8.77),
    (GPT, "CAME, scheduled", "a100"): (CAME, False, True, 7.44),
    (LLM, "AdamW", "b200"): (ADAMW, False, False, 147.02),
    (LLM, f"AdamW{CHECKPOINT}", "b200"): (ADAMW, True, False, 102.2),
    (LLM, "LOMO, not scheduled", "h100"): (LOMO, False, False, 59.4),
    (LLM, f"LOMO{CHECKPOINT}, not scheduled", "h100"): (LOMO, True, False, 14.58),
    (LLM, "LOMO, scheduled", "h100"): (LOMO, False, True, 59.4),
    (LLM, f"LOMO{CHECKPOINT}, scheduled", "h100"): (LOMO, True, True, 14.58),
    (LLM, f"LOMO{LEAN}, scheduled", "h100"): (LOMO, False, True, 59.4),
    (LLM, f"LOMO{CHECKPOINT}{LEAN}, scheduled", "h100"): (LOMO, True, True, 14.58),
    (LLM, f"AdaLomo{CHECKPOINT}, scheduled", "h100"): (ADALOMO, True, True, ""),
    (LLM, f"AdaLomo{CHECKPOINT}, scheduled", "l4"): (ADALOMO, True, True, ""),
    (LLM, f"8-bit GaLore{CHECKPOINT}, scheduled", "l4"): (GALORE, True, True, ""),
}


def row(name, how, target, tx, remat, scheduled, theirs) -> tuple:
    return *peak(name, tx, target, remat, scheduled, LEAN in how), theirs


def main() -> None:
    rows = {
        (name, how, target): functools.partial(row, name, how, target, *case)
        for (name, how, target), case in PUBLISHED.items()
    }
    columns = ("model", "how", "target", "peak GiB", MS, "published GiB")
    publish_some("optimizers_published", columns, rows, sys.argv[1:])


if __name__ == "__main__":
    main()
