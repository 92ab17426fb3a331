"""Compiles that end when the buffers are assigned, and the reports made of them."""

import dataclasses
import functools
import pickle

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

import jaxmem
from benchmarks.models import pi0, zoo
from benchmarks.models import zoo_vision as vision
from benchmarks.models.transformers import BertConfig, StackConfig
from benchmarks.models.vision import ResNet, ResNetConfig, ViT, ViTConfig
from benchmarks.models.zoo_transformers import GPT2, Llama, MaskedBert
from jaxmem.memory import CompileError, _pending, begin, estimate
from jaxmem.memory.compile import pool
from jaxmem.memory.report import report as reporting
from tests.memory.test_estimate import SDS, W, X, needs_h100, needs_tpu, sgd
from tests.memory.test_estimate import own_cache as own_cache

# XLA:GPU of jax 0.11 and later finds tiles where that of 0.10 without a device fails
FINDS_TILES = jax.__version_info__ >= (0, 11)
NO_TILES = "XLA found no tiles for a product"


def sizes(report):
    return (
        *(report.argument_bytes, report.output_bytes),
        *(report.temp_bytes, report.alias_bytes),
    )


def adam_step(state, x):
    """Scanned layers under Adam: parameters and moments can be written in place."""
    ws, moments = state

    def loss(ws):
        layer = lambda x, w: (jax.nn.gelu(x @ w), None)
        return jnp.sum(jax.lax.scan(layer, x, ws)[0] ** 2)

    updates, moments = zoo.OPTIMIZER.update(jax.grad(loss)(ws), moments, ws)
    return optax.apply_updates(ws, updates), moments


def adam_args():
    ws = SDS((3, 64, 64), jnp.float32)
    return (ws, jax.eval_shape(zoo.OPTIMIZER.init, ws)), X


@pytest.fixture
def submitted(monkeypatch):
    """How often a worker was asked to compile, and whether to the end."""
    seen = []
    submit = pool.Pool.submit

    def count(self, request, timeout, *, code=True):
        seen.append(code)
        return submit(self, request, timeout, code=code)

    monkeypatch.setattr(pool.Pool, "submit", count)
    return seen


# -- figures


@needs_h100
@pytest.mark.usefixtures("standard_jax")
def test_a_compile_that_ends_early_has_the_figures_of_a_whole_one(submitted):
    kwargs = {"target": "h100", "donate_argnums": 0, "cache": False}
    early = estimate(adam_step, *adam_args(), **kwargs)
    whole = estimate(adam_step, *adam_args(), full=True, **kwargs)
    assert submitted == [False, True]
    assert sizes(early) == sizes(whole)
    assert early.alias_bytes == 3 * 3 * 64 * 64 * 4 + 4  # with Adam's count
    assert early.at_peak == whole.at_peak


def _small(model, inputs):
    state, logits = zoo.abstract(model, inputs, zoo.OPTIMIZER)
    labels = SDS(logits.shape[:-1], jnp.int32)
    return zoo.train_step(model, zoo.OPTIMIZER), (state, inputs, labels, zoo.KEY)


def _images(model, size, channels=3):
    return _small(model, SDS((2, size, size, channels), jnp.float32))


def _tokens(model, length):
    return _small(model, SDS((2, length), jnp.int32))


_STACK = StackConfig(2, 128, 4, 2, 256, dropout=0.0)
_GPT = StackConfig(2, 128, 4, 4, 512)
SMALL = {
    "resnet": lambda: _images(ResNet(ResNetConfig((1, 1, 1, 1))), 64),
    "mobilenet": lambda: _images(vision.MOBILENET_V2(), 64),
    "unet": lambda: _images(vision.UNet(), 64, 1),
    "vgg": lambda: _images(vision.VGG((1, 1, 1, 1, 1)), 64),
    "vit": lambda: _images(ViT(ViTConfig(2, 128, 4, 512), scanned=True), 64),
    "bert": lambda: _tokens(MaskedBert(BertConfig(2, 128, 4, 512), True), 64),
    "bert unrolled": lambda: _tokens(MaskedBert(BertConfig(2, 128, 4, 512), False), 64),
    "gpt2": lambda: _tokens(GPT2(_GPT, True), 64),
    "gpt2 unrolled": lambda: _tokens(GPT2(_GPT, False), 64),
    "llama": lambda: _tokens(Llama(_STACK, True), 64),
    "llama unrolled": lambda: _tokens(Llama(_STACK, False), 64),
}


@pytest.mark.slow
@needs_h100
@pytest.mark.usefixtures("standard_jax")
@pytest.mark.parametrize("name", SMALL)
def test_the_figures_are_those_of_whole_compiles_over_the_zoo(name, submitted):
    step, args = SMALL[name]()
    kwargs = {"target": "h100", "donate_argnums": 0, "cache": False}
    early = estimate(step, *args, **kwargs)
    whole = estimate(step, *args, full=True, **kwargs)
    assert set(submitted) == {False, True}
    assert sizes(early) == sizes(whole)
    state = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(args[0]))
    assert early.alias_bytes == state


@needs_tpu
def test_what_is_told_of_a_tpu_is_compiled_to_the_end(submitted):
    """Its buffers are not the last when they are assigned: they only rank choices."""
    ranked = begin(sgd, (W, X), {}, target="tpu-v5e", extent="buffers", cache=False)
    ranked.result()
    told = begin(sgd, (W, X), {}, target="tpu-v5e", cache=False)
    told.result()
    assert submitted == [False, True]
    assert (ranked.final, told.final) == (False, True)


@needs_tpu
@pytest.mark.slow
def test_what_is_told_of_a_tpu_is_what_it_assigns(standard_jax):
    """Older versions of libtpu tell other bytes: here 8 % more."""
    ws = SDS((8, 2048, 2048), jnp.float32)
    args = (ws, jax.eval_shape(zoo.OPTIMIZER.init, ws)), SDS((4096, 2048), jnp.float32)
    how = {"target": "tpu-v5e", "donate": (0,), "cache": False}
    early, told = (
        begin(adam_step, args, {}, extent=extent, **how).result().temp_bytes
        for extent in ("buffers", "needed")
    )
    assert told == pytest.approx(early, abs=2**16)


# -- products for which XLA finds no tiles


def attention_step(w, x):
    """One layer of 17 tokens, a number that 16 does not divide."""

    def loss(w):
        b, t, d = x.shape
        q, k, v = (jnp.reshape(x @ w[i], (b, t, 2, -1)) for i in range(3))
        s = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k))
        y = jnp.einsum("bhqk,bkhd->bqhd", s, v).reshape(b, t, d)
        return jnp.sum((y @ w[3]).astype(jnp.float32) ** 2)

    return w - jax.grad(loss)(w)


ATTENTION = SDS((4, 64, 64), jnp.bfloat16), SDS((2, 17, 64), jnp.bfloat16)


@needs_h100
def test_attention_without_tiles_is_estimated_and_the_report_says_how(submitted):
    kwargs = {"target": "h100", "donate_argnums": 0}
    first = estimate(attention_step, *ATTENTION, **kwargs)
    told = [note for note in first.notes if NO_TILES in note]
    assert bool(told) != FINDS_TILES
    assert len(submitted) == 1 + len(told)  # a second compile on this error alone
    jaxmem.memory._estimate._SEEN.clear()  # as in another process: found on disk
    assert estimate(attention_step, *ATTENTION, **kwargs) == first
    assert len(submitted) == 1 + len(told)


@needs_h100
@pytest.mark.slow
def test_a_step_without_tiles_is_not_larger_once_scheduled():
    plan = jaxmem.schedule(attention_step, target="h100", donate_argnums=0).plan(
        *ATTENTION
    )
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes
    both = [any(NO_TILES in n for n in r.notes) for r in (plan.plain, plan.scheduled)]
    assert both[0] == both[1]  # compiled alike


@pytest.mark.slow
@needs_h100
@pytest.mark.usefixtures("standard_jax")
def test_a_vit_of_197_tokens_estimates_and_is_not_larger_once_scheduled():
    config = ViTConfig(4, 512, 8, 2048, dtype=jnp.bfloat16)
    image = SDS((8, 16, 197 * 16, 3), jnp.float32)  # a row of patches
    step, args = _small(ViT(config, scanned=True), image)
    plan = jaxmem.schedule(step, target="h100", donate_argnums=0).plan(*args)
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes


@pytest.fixture
def refused(monkeypatch):
    """The options of each compile; the first ones end with what is in `words`."""
    asked, words = [], []
    result = pool.Compile.result

    def answer(self):
        asked.append(self._request["compiler_options"])
        if len(asked) <= len(words):
            self.cancel()
            raise CompileError(words[len(asked) - 1])
        return result(self)

    monkeypatch.setattr(pool.Compile, "result", answer)
    return asked, words


@needs_h100
def test_thresholds_are_raised_one_after_another(refused):
    asked, words = refused
    words += 2 * ["INTERNAL: Couldn't find output tile sizes for ..."]
    own = {"xla_disable_hlo_passes": "dot-merger"}
    report = estimate(sgd, W, X, target="h100", cache=False, compiler_options=own)
    thresholds = [o.get("xla_gpu_gemm_rewrite_size_threshold") for o in asked]
    assert thresholds == [None, 2**21, 2**24]
    passes = [o["xla_disable_hlo_passes"] for o in asked]
    assert passes == ["dot-merger", *["dot-merger,cublas-pad-for-gemms"] * 2]
    assert any("fewer than 2^24 elements" in note for note in report.notes)


@needs_h100
def test_products_without_a_form_of_xla_are_left_to_the_library(refused):
    asked, words = refused
    words.append(
        "INTERNAL: No supported config found for HLO: %gemm_fusion_dot.1 = ..."
    )
    report = estimate(sgd, W, X, target="h100", cache=False)
    assert [o.get("xla_gpu_enable_triton_gemm") for o in asked] == [None, False]
    assert any("leave all of them to cuBLAS" in note for note in report.notes)


@needs_h100
@pytest.mark.slow
@pytest.mark.usefixtures("standard_jax")
def test_a_program_with_such_products_is_scheduled():
    made = pi0.full_step(optax.sgd(1e-3), 32, layers=2, images=1)
    how = {"target": "h100", "donate_argnums": made.donate}
    plan = jaxmem.schedule(made.step, **how).plan(*made.args)
    assert plan.scheduled.peak_bytes <= plan.plain.peak_bytes
    both = [
        any("to cuBLAS" in n for n in r.notes) for r in (plan.plain, plan.scheduled)
    ]
    assert both[0] == both[1]  # compiled alike


@needs_h100
@pytest.mark.parametrize("count", [1, 9])
def test_another_error_or_one_that_stays_is_told(refused, count):
    asked, words = refused
    words += count * ["Couldn't find output tile sizes" if count > 1 else "died"]
    with pytest.raises(CompileError, match=words[0]):
        estimate(sgd, W, X, target="h100", cache=False)
    assert len(asked) == (1 if count == 1 else 1 + len(_pending.THRESHOLDS))


# -- kernels


def double(x):
    """A kernel that needs TMA, which no chip before Hopper has."""

    def kernel(x, out, block, barrier):
        plgpu.copy_gmem_to_smem(x, block, barrier)
        plgpu.barrier_wait(barrier)
        block[...] = 2 * block[...]
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(block, out)
        plgpu.wait_smem_to_gmem(0)

    like = SDS(x.shape, x.dtype)
    scratch = plgpu.SMEM(x.shape, x.dtype), plgpu.Barrier()
    return plgpu.kernel(kernel, out_type=like, scratch_types=scratch)(x)


@needs_h100
@pytest.mark.slow
def test_a_kernel_is_compiled_for_each_chip_of_a_process():
    """Compiled for one chip, it is not taken for compiled on the next."""
    x = SDS((64, 64), jnp.float32)
    assert estimate(double, x, target="h100").peak_bytes == 2 * 64 * 64 * 4
    with pytest.raises(CompileError, match="for a100"):  # by jax or by the compiler
        estimate(double, x, target="a100")
    assert estimate(double, x, target="b200").peak_bytes == 2 * 64 * 64 * 4


@needs_h100
@pytest.mark.slow
def test_code_of_a_kernel_is_generated_once(submitted):
    """Other steps that call it end when buffers are assigned, with equal bytes."""
    x = SDS((64, 96), jnp.float32)
    step = lambda more, x: jnp.sin(double(x)) + more
    first = estimate(functools.partial(step, 1), x, target="h100", cache=False)
    second = estimate(functools.partial(step, 2), x, target="h100", cache=False)
    to_the_end = estimate(
        functools.partial(step, 2), x, target="h100", cache=False, full=True
    )
    other = estimate(double, SDS((64, 128), jnp.float32), target="h100", cache=False)
    assert submitted == [True, False, True, True] and other.peak_bytes
    assert sizes(second) == sizes(to_the_end) == sizes(first)
    assert second.seconds == to_the_end.seconds


# -- reports


def test_who_holds_the_bytes_is_found_out_when_it_is_read(monkeypatch):
    read = []
    attribute = reporting.attribute

    def count(*args):
        read.append(args)
        return attribute(*args)

    monkeypatch.setattr(reporting, "attribute", count)
    report = estimate(sgd, W, X, donate_argnums=0)
    assert report.fits("1MiB") and not report.fits(report.peak_bytes - 1)
    assert not read
    assert sum(holder.bytes for holder in report.at_peak) == report.peak_bytes
    assert report.notes == () and report.timeline
    assert len(read) == 1


def test_an_unread_report_is_a_value_like_any_other():
    report = estimate(sgd, W, X, donate_argnums=0)
    copy = pickle.loads(pickle.dumps(report))
    assert dataclasses.replace(report, name="other").at_peak == copy.at_peak
    assert jaxmem.memory.MemoryReport.from_json(report.to_json()) == report
    with pytest.raises(AttributeError, match="no attribute 'peak'"):
        _ = report.peak


def test_a_thread_that_comes_late_finds_what_another_has_read():
    """It looked before the rows were there, and asks for them when they are."""
    report = estimate(sgd, W, X, donate_argnums=0)
    rows = report.at_peak
    assert type(report).__getattr__(report, "at_peak") is rows
