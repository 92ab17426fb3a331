"""What `benchmarks.headlines` compiles: each function gives a row's plain and own side.

Whole train steps give peaks with their state donated, gradients alone the bytes of
their temporaries. MiB of one device, unless said otherwise.
"""

import functools
from collections.abc import Callable
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks import accumulation, frozen_models, zoo
from benchmarks._common import MIB
from benchmarks.headline_models import (
    T5,
    ImageClassifier,
    LeakyResNet,
    LlamaBlocks,
    LlamaParts,
    Parts,
    Sizes,
    TextClassifier,
)
from benchmarks.models import (
    LLAMA_1B,
    Bert,
    BertConfig,
    Layer,
    StackConfig,
    abstract_params,
    mean_square,
)
from benchmarks.pod_steps import FSDP, Model
from benchmarks.pod_steps import step_of as sharded_step
from benchmarks.release import KEY, adam_step
from benchmarks.zoo_transformers import Llama
from jaxmem import ops
from jaxmem.nn import linen
from jaxmem.optim import abstract_state, adamw, split_master

SDS = jax.ShapeDtypeStruct
Pair = tuple[float, float]
ADAMW = optax.adamw(1e-4)
TIMEOUT = 1200.0  # seconds of a compile


def estimated(step: Callable, *args, target: str, donate=(0,), scheduled=False):
    """The report of a step; scheduled: of what `jaxmem.schedule` makes of it."""
    how = {"target": target, "donate_argnums": donate}
    if scheduled:
        report = jaxmem.schedule(step, **how).plan(*args).scheduled
        assert report is not None
        return report
    return jaxmem.estimate(step, *args, **how, timeout=TIMEOUT)


def peak(model: nn.Module, inputs, target: str, scheduled: bool = False) -> float:
    """Of an AdamW step on the mean cross entropy of classes."""
    state, logits = zoo.abstract(model, inputs, ADAMW)
    labels = SDS(logits.shape[:-1], jnp.int32)
    step = zoo.train_step(model, ADAMW)
    args = state, inputs, labels, zoo.KEY
    return estimated(step, *args, target=target, scheduled=scheduled).peak_bytes / MIB


# -- Tempo: the flags of DeepSpeed's transformer kernel


def bert_large(batch: int, target: str) -> Pair:
    tokens = SDS((batch, 512), jnp.int32)
    plain = Bert(BertConfig())

    def of(model) -> float:
        step, (state, *_) = adam_step(model)
        return estimated(step, state, tokens, KEY, target=target).peak_bytes / MIB

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
    plain, own = (count(n) / 1e6 for n in layers)
    return plain, own


# -- few bits, sampled and projected layers, in RoBERTa-base and BERT-base


def parts_of_text(parts: Parts, batch: int) -> float:
    return peak(TextClassifier(Sizes(), parts), _tokens(batch), "a100")


def lean_text(batch: int, parts: Parts | None = None, **how) -> float:
    """Substituted and scheduled."""
    model = jaxmem.substitute(TextClassifier(Sizes(), parts or Parts()), **how)
    return peak(model, _tokens(batch), "a100", scheduled=True)


def _tokens(batch: int) -> jax.ShapeDtypeStruct:
    return SDS((batch, 128), jnp.int32)


def gelu_of(bits: int | str) -> Parts:
    return Parts(act=functools.partial(ops.gelu, approximate=False, save=bits))


def sampled(budget: float, bits: int) -> Parts:
    dense = functools.partial(
        linen.SampledDense, budget=budget, rng_collection="dropout"
    )
    return Parts(dense, gelu_of(bits).act)


def gelu_alone() -> Pair:
    return parts_of_text(Parts(), 128), parts_of_text(gelu_of(3), 128)


def gelu_and_projections() -> Pair:
    return parts_of_text(Parts(), 128), parts_of_text(sampled(0.2, 3), 128)


def exact_roberta() -> Pair:
    return parts_of_text(Parts(), 128), lean_text(128)


def winner_take_all() -> Pair:
    own = lean_text(100, sampled(0.3, 4), activations=4)
    return parts_of_text(Parts(), 100), own


# -- vision: DeiT-B and ViT-B


def parts_of_image(parts: Parts, batch: int) -> float:
    return peak(ImageClassifier(parts=parts), _images(batch), "a100")


def lean_image(batch: int, **how) -> float:
    """Substituted and scheduled."""
    model = jaxmem.substitute(ImageClassifier(parts=Parts()), **how)
    return peak(model, _images(batch), "a100", scheduled=True)


def _images(batch: int) -> jax.ShapeDtypeStruct:
    return SDS((batch, 224, 224, 3), jnp.float32)


def mesa() -> Pair:
    return parts_of_image(Parts(), 128), lean_image(128, save=8)


def mesa_exact() -> Pair:
    return parts_of_image(Parts(), 128), lean_image(128)


def approximated() -> Pair:
    """ReGELU2 and MS norms, and nothing else."""
    parts = Parts(linen.Dense, ops.regelu2, linen.MSLayerNorm)
    return parts_of_image(Parts(), 64), parts_of_image(parts, 64)


# -- in-place activated batch norm


def in_place(act: bool, dtype: Any, name: str):
    kind = "leaky_relu" if act else "identity"
    how = {"activation": kind, "momentum": 0.9, "dtype": dtype, "name": name}
    return linen.InPlaceABN(False, **how)


def resnet_gradient(normed: Callable | None):
    model = LeakyResNet(normed=normed) if normed else LeakyResNet()
    images = SDS((64, 224, 224, 3), jnp.float32)
    state, logits = zoo.abstract(model, images, optax.identity())
    labels = SDS(logits.shape[:-1], jnp.int32)

    def gradient(params, statistics, images, labels):
        def loss(params):
            variables = {"params": params, **statistics}
            logits, new = model.apply(variables, images, mutable=["batch_stats"])
            entropy = optax.softmax_cross_entropy_with_integer_labels
            return entropy(logits.astype(jnp.float32), labels).mean(), new

        return jax.grad(loss, has_aux=True)(params)

    return gradient, (*state[:2], images, labels)


def inplace_abn_kept() -> Pair:
    """What the loss keeps for its gradient, as JAX alone would have it."""

    def kept(normed) -> float:
        model = LeakyResNet(normed=normed) if normed else LeakyResNet()
        _, (params, statistics, images, _) = resnet_gradient(normed)

        def loss(params, statistics, images):
            variables = {"params": params, **statistics}
            logits, _ = model.apply(variables, images, mutable=["batch_stats"])
            return logits.astype(jnp.float32).sum()

        args = params, statistics, images
        return jaxmem.residuals(loss, *args, argnums=0).total_bytes / MIB

    return kept(None), kept(in_place)


def inplace_abn_compiled() -> Pair:
    def temp(normed, scheduled: bool) -> float:
        gradient, args = resnet_gradient(normed)
        how = {"target": "h100", "donate": (), "scheduled": scheduled}
        return estimated(gradient, *args, **how).temp_bytes / MIB

    return temp(None, False), temp(in_place, True)


# -- gradients of a part: T5-base and Mistral-7B, norms alone or everything

MISTRAL = StackConfig(32, 4096, 32, 8, 14_336, 0.0)


def part_gradient(model, x, wanted: Callable, narrow: bool, scheduled: bool = False):
    """Peak of the gradient of a part of the parameters, as the paper measures."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    params = jax.eval_shape(model.init, keys, x)["params"]
    if narrow:
        params = jax.tree.map(lambda p: SDS(p.shape, jnp.bfloat16), params)
    trained, frozen = jaxmem.trainable(params, wanted)

    def loss(params, x, labels, key):
        rngs = {"dropout": jax.random.wrap_key_data(key)}
        logits = model.apply({"params": params}, x, rngs=rngs)
        entropy = optax.softmax_cross_entropy_with_integer_labels
        return entropy(logits.astype(jnp.float32), labels).mean()

    def gradient(trained, frozen, x, labels, key):
        return jaxmem.value_and_grad(loss)(trained, frozen, x, labels, key)

    args = trained, frozen, x, SDS(x.shape[:-1], jnp.int32), KEY
    how = {"target": "h100", "donate": (), "scheduled": scheduled}
    return estimated(gradient, *args, **how).peak_bytes / MIB


def norms(path: str, leaf) -> bool:
    del leaf
    return "norm" in path


def everything(path: str, leaf) -> bool:
    del path, leaf
    return True


def t5(wanted: Callable) -> Pair:
    x = SDS((64, 256, 768), jnp.float32)
    of = functools.partial(part_gradient, x=x, wanted=wanted, narrow=False)
    return of(T5()), of(jaxmem.substitute(T5()), scheduled=True)


def mistral(wanted: Callable) -> Pair:
    x = SDS((16, 256, 4096), jnp.bfloat16)
    of = functools.partial(part_gradient, x=x, wanted=wanted, narrow=True)
    model = LlamaBlocks(MISTRAL, classes=5000)
    return of(model), of(jaxmem.substitute(model), scheduled=True)


# -- VeLoRA: value and down projections of Llama-1B's blocks


def projected(name: str) -> Any:
    if name not in ("value", "down"):
        return nn.Dense
    return functools.partial(linen.VeLoRADense, groups=32)


def velora() -> Pair:
    """Temporaries of the loss gradient after `substitute`, with and without VeLoRA."""

    def temp(parts: LlamaParts) -> float:
        model = jaxmem.substitute(LlamaBlocks(LLAMA_1B, parts), activations="input")
        x = SDS((2, 2048, LLAMA_1B.width), jnp.bfloat16)
        keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
        variables = dict(jax.eval_shape(model.init, keys, x))
        params = variables.pop("params")

        def loss(params, rest, x):
            y = model.apply({"params": params, **rest}, x)
            return jnp.mean(jnp.square(y.astype(jnp.float32)))

        gradient = jax.grad(loss)
        found = estimated(gradient, params, variables, x, target="h100", donate=())
        return found.temp_bytes / MIB

    return temp(LlamaParts()), temp(LlamaParts(projected))


# -- SHERL: a side network on a frozen ViT


def late_half() -> Pair:
    """Gradient of all layers, plain, and of the late half, substituted; compiled."""
    config = frozen_models.EncoderConfig()
    x = SDS((16, 512, config.width), config.dtype)
    plain = frozen_models.Stack(config, frozen_models.EncoderLayer)
    params = abstract_params(plain, x)

    def temp(model, wanted) -> float:
        trained, frozen = jaxmem.trainable(params, wanted)
        loss = lambda params, x: mean_square(model)(params, x, jax.random.key(0))

        def gradient(trained, frozen, x):
            return jaxmem.value_and_grad(loss)(trained, frozen, x)

        args = trained, frozen, x
        how = {"target": "h100", "donate": (), "scheduled": model is not plain}
        return estimated(gradient, *args, **how).temp_bytes / MIB

    late = [f"layer_{number}" for number in range(6, 12)]
    return temp(plain, everything), temp(jaxmem.substitute(plain), late)


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

    def megabytes(loss) -> float:
        gradient = jax.value_and_grad(loss, (0, 1))
        found = estimated(gradient, x, kernel, labels, target="a100", donate=())
        return (found.temp_bytes + found.output_bytes) / 1e6

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
    before = estimated(plain.step, *args, target="a100").peak_bytes
    how = {"target": "a100", "donate_argnums": 0}
    step = jaxmem.schedule(own.step, int(0.55 * before), **how)
    found = step.plan(*args).scheduled
    assert found is not None
    return before / MIB, found.peak_bytes / MIB


def flash_optim() -> Pair:
    """Llama-3.1-8B, layers checkpointed: AdamW in float32, and in 8 bits, in GiB."""
    model = Llama(zoo.LLAMA3_8B, scanned=True)
    model = model.clone(layer=nn.remat(model.layer))
    tokens = SDS((1, 2048), jnp.int32)
    labels, target = tokens, "b200"

    def gib(tx, dtype, scheduled) -> float:
        (params, statistics, _), _ = zoo.abstract(model, tokens, optax.identity())
        params = jax.tree.map(lambda p: SDS(p.shape, dtype), params)
        state = params, statistics, abstract_state(tx, params)
        args = state, tokens, labels, zoo.KEY
        how = {"target": target, "scheduled": scheduled}
        return estimated(zoo.train_step(model, tx), *args, **how).peak_bytes / 2**30

    own = split_master(adamw(1e-4, bits=8))
    return gib(ADAMW, jnp.float32, False), gib(own, jnp.bfloat16, True)


# -- Memformer: replay through time


def lstm_step(steps: int = 4096, batch: int = 64, width: int = 512):
    """An LSTM's step with Adam, and its arguments: as anyone writes it."""

    def cell(weights, carry, x):
        h, memory = carry
        z = jnp.concatenate([x, h], -1) @ weights["w"] + weights["b"]
        i, f, g, o = jnp.split(z, 4, -1)
        memory = jax.nn.sigmoid(f) * memory + jax.nn.sigmoid(i) * jnp.tanh(g)
        h = jax.nn.sigmoid(o) * jnp.tanh(memory)
        return (h, memory), h

    def loss(weights, xs):
        zeros = jnp.zeros((batch, width))
        body = lambda carry, x: cell(weights, carry, x)
        (h, _), _ = jax.lax.scan(body, (zeros, zeros), xs)
        return (h @ weights["out"]).mean()

    tx = optax.adam(1e-3)

    def step(state, xs):
        weights, moments = state
        value, grads = jax.value_and_grad(loss)(weights, xs)
        updates, moments = tx.update(grads, moments, weights)
        return (optax.apply_updates(weights, updates), moments), value

    f32 = lambda *shape: SDS(shape, jnp.float32)
    weights = {
        "w": f32(2 * width, 4 * width),
        "b": f32(4 * width),
        "out": f32(width, 1),
    }
    state = weights, jax.eval_shape(tx.init, weights)
    return step, (state, f32(steps, batch, width))


def replay(budget: str = "620MiB") -> Pair:
    step, args = lstm_step()
    plan = jaxmem.schedule(step, budget, target="h100", donate_argnums=0).plan(*args)
    return plan.plain.peak_bytes / MIB, plan.scheduled.peak_bytes / MIB
