"""Whole steps of BERT-Large and Llama, and the head of Gemma."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks import accumulation
from benchmarks._common import milliseconds, size_and_ms
from benchmarks.headline.claim import Pair, Side
from benchmarks.headline.measured import ADAMW, SDS, estimated
from benchmarks.models import zoo
from benchmarks.models.transformers import Bert, BertConfig, Layer, abstract_params
from benchmarks.models.zoo_transformers import Llama
from benchmarks.release import KEY, adam_step
from benchmarks.steps.pod import FSDP, Model
from benchmarks.steps.pod import step_of as sharded_step
from jaxmem import ops
from jaxmem.optim import abstract_state, adamw, split_master

# -- Tempo: the flags of DeepSpeed's transformer kernel


def bert_large(batch: int, target: str) -> Pair:
    tokens = SDS((batch, 512), jnp.int32)
    plain = Bert(BertConfig())

    def of(model) -> Side:
        step, (state, *_) = adam_step(model)
        found = estimated(step, state, tokens, KEY, target=target)
        return size_and_ms(found, "peak_bytes")

    return of(plain), of(jaxmem.substitute(plain))


# -- AdamA: the deepest model that fits


def deepest(how: str, target: str, gib: float) -> int:
    """Layers of BERT-Large's size whose step of 8 micro-batches fits: by bisection."""
    make = accumulation.VARIANTS[how]

    def fits(layers: int) -> bool:
        model = Bert(BertConfig(layers=layers), layer=nn.remat(Layer))
        step, tx, count = make(accumulation.loss_of(model), 8)
        params = abstract_params(model, accumulation.TOKENS)
        tokens = SDS((8 * count, 128), jnp.int32)
        args = params, jax.eval_shape(tx.init, params), tokens, accumulation.KEY
        found = estimated(step, *args, target=target, donate=(0, 1))
        return found.peak_bytes <= gib * 2**30

    least, most = 24, 48
    while fits(most):
        least, most = most, 2 * most
    while most - least > max(1, least // 64):
        middle = (least + most) // 2
        least, most = (middle, most) if fits(middle) else (least, middle)
    return least


def deepest_models(target: str = "h100", gib: float = 78) -> Pair:
    """Parameters, in millions; the embeddings are 31.8 of them."""
    layers = [
        deepest(how, target, gib)
        for how in ("accumulation by hand, Adam", "microbatch, AdamA")
    ]
    count = lambda n: sum(
        x.size
        for x in jax.tree.leaves(
            abstract_params(Bert(BertConfig(layers=n)), accumulation.TOKENS)
        )
    )
    plain, own = ((count(n) / 1e6, None) for n in layers)
    return plain, own


# -- heads of large vocabularies, and whole Llama steps


def gemma_head() -> Pair:
    """Loss and gradients of Gemma-2 2B's head, 8,192 tokens: what both take, in MB."""
    x, kernel = SDS((8192, 2304), jnp.bfloat16), SDS((2304, 256_000), jnp.bfloat16)
    labels = SDS((8192,), jnp.int32)

    def capped(x, kernel, labels):
        logits = (x @ kernel).astype(jnp.float32)
        log_p = jax.nn.log_softmax(30 * jnp.tanh(logits / 30))
        return -jnp.take_along_axis(log_p, labels[:, None], 1).mean()

    own = functools.partial(ops.linear_cross_entropy, softcap=30.0)

    def megabytes(loss) -> Side:
        gradient = jax.value_and_grad(loss, (0, 1))
        found = estimated(gradient, x, kernel, labels, target="a100", donate=())
        return (found.temp_bytes + found.output_bytes) / 1e6, milliseconds(found)

    return megabytes(capped), megabytes(own)


LLAMA_8B = Model(32, 4096, 14_336, 32, 128_256)


def liger() -> Pair:
    """Llama-3-8B in bfloat16 over 8 A100, 8 x 2,048 tokens on each, AdamW.

    Layers are checkpointed on both sides; on ours they are substituted besides, and the
    step is scheduled within 55 % of the plain one's peak.
    """

    def narrow(x):
        wide = x.dtype == jnp.float32
        dtype = jnp.bfloat16 if wide else x.dtype
        return SDS(x.shape, dtype, sharding=x.sharding)

    made = functools.partial(sharded_step, LLAMA_8B, FSDP, "a100", 64)
    plain = made(write=jax.checkpoint)
    own = made(write=lambda layer: jax.checkpoint(jaxmem.substitute(layer)))
    args = jax.tree.map(narrow, plain.args)
    before = estimated(plain.step, *args, target="a100")
    how = {"target": "a100", "donate_argnums": 0}
    step = jaxmem.schedule(own.step, int(0.55 * before.peak_bytes), **how)
    found = step.plan(*args).scheduled
    assert found is not None
    return size_and_ms(before, "peak_bytes"), size_and_ms(found, "peak_bytes")


def flash_optim() -> Pair:
    """Llama-3.1-8B, layers checkpointed: AdamW in float32, and in 8 bits, in GiB."""
    model = Llama(zoo.LLAMA3_8B, scanned=True)
    model = model.clone(layer=nn.remat(model.layer))
    tokens = SDS((1, 2048), jnp.int32)
    labels, target = tokens, "b200"

    def gib(tx, dtype, scheduled) -> Side:
        (params, statistics, _), _ = zoo.abstract(model, tokens, optax.identity())
        params = jax.tree.map(lambda p: SDS(p.shape, dtype), params)
        state = params, statistics, abstract_state(tx, params)
        args = state, tokens, labels, zoo.KEY
        how = {"target": target, "scheduled": scheduled}
        found = estimated(zoo.train_step(model, tx), *args, **how)
        return found.peak_bytes / 2**30, milliseconds(found)

    own = split_master(adamw(1e-4, bits=8))
    return gib(ADAMW, jnp.float32, False), gib(own, jnp.bfloat16, True)
