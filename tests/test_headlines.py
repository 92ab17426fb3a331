"""Published claims beside ours: rows filled or explained, models that agree."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.figures.headlines import lines
from benchmarks.figures.rows import rows
from benchmarks.headline import CLAIMS
from benchmarks.headline.claim import Claim
from benchmarks.headline.inplace_abn import in_place
from benchmarks.headline.models import (
    T5,
    ImageClassifier,
    LeakyResNet,
    LlamaBlocks,
    Parts,
    Sizes,
    TextClassifier,
)
from benchmarks.headline.parts import projected
from benchmarks.models.transformers import StackConfig
from jaxmem import ops
from jaxmem.nn import linen

SMALL = Sizes(2, 16, 2, 32, dropout=0.0)
# what papers of the library's systems and of its peers claim, by their names here
SOURCES = {
    *("Tempo", "DeepSpeed", "AdamA", "Few-Bit", "selective differentiation"),
    *("Approx-BP, MS-BP", "Mesa", "VeLoRA", "WTA-CRS", "nested forward AD"),
    *("In-place ABN", "SHERL", "ROAM", "Checkmate", "GaLore", "LOMO", "CAME"),
    *("Cut Cross-Entropy", "Liger", "FlashOptim", "Memformer"),
}


def test_every_claim_has_a_row_and_every_row_a_claim():
    assert {claim.source for claim in CLAIMS} == SOURCES
    keys = [claim.key for claim in CLAIMS]
    assert len(set(keys)) == len(keys)
    assert [(r["source"], r["claim"]) for r in rows("headlines")] == keys


@pytest.mark.parametrize("line", lines(), ids=lambda x: f"{x.source}: {x.claim}")
def test_a_row_is_filled_or_says_why_not(line):
    assert line.gain or "not run" in line.differs or "No step was" in line.differs
    assert line.theirs or line.differs
    assert line.work or line.differs


@pytest.mark.parametrize("claim", CLAIMS, ids=lambda x: f"{x.source}: {x.says}")
def test_a_file_has_the_claim_as_it_is_written(claim):
    found = next(r for r in rows("headlines") if r["claim"] == claim.says)
    figures = [found["published before"], found["published after"]]
    assert [float(x) if x else None for x in figures] == [claim.before, claim.after]
    assert (found["work"], found["differs"]) == (claim.work, claim.differs)


def test_gains_are_times_less_or_times_more():
    claim = Claim("a", "link", "says", "MiB", 100, 77, "work")
    assert claim.gain(6.0, 3.0) == 2.0
    assert dataclasses.replace(claim, more=True).gain(3.0, 6.0) == 2.0
    assert claim.gain(None, None) is None


def agree(plain, own, x, tolerance=1e-5):
    """A model with a paper's parts has the outputs of the plain one."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = jax.jit(plain.init)(keys, x)
    want, got = (jax.jit(m.apply)(variables, x) for m in (plain, own))
    np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance)


@pytest.mark.usefixtures("standard_jax")
class TestModels:
    """In float32: the parts round in another order, 1e-5 of values of order one."""

    def test_text(self):
        act = functools.partial(ops.gelu, approximate=False, save=3)
        tokens = jnp.arange(8).reshape(2, 4)
        model = functools.partial(TextClassifier, SMALL, words=16)
        agree(model(), model(parts=Parts(act=act)), tokens)

    def test_image(self):
        parts = Parts(linen.Dense, ops.regelu2, linen.MSLayerNorm)
        images = jax.random.normal(jax.random.key(2), (2, 32, 32, 3))
        model = functools.partial(ImageClassifier, SMALL, classes=3)
        agree(model(), model(parts=parts), images)

    def test_llama(self):
        config = StackConfig(2, 32, 4, 2, 32, 0.0, dtype=jnp.float32)
        x = jax.random.normal(jax.random.key(2), (2, 4, 32))
        own = LlamaBlocks(config, projected, classes=3)
        plain = LlamaBlocks(config, classes=3)
        variables = jax.jit(own.init)(jax.random.key(0), x)
        want = jax.jit(plain.apply)({"params": variables["params"]}, x)
        got = jax.jit(own.apply)(variables, x)
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-5)

    def test_resnet(self):
        images = jax.random.normal(jax.random.key(2), (4, 32, 32, 3))
        model = functools.partial(LeakyResNet, (1, 1), dtype=jnp.float32)
        variables = jax.jit(model().init)(jax.random.key(0), images)
        run = lambda m: lambda *args: m.apply(*args, mutable=["batch_stats"])
        apply = lambda m: jax.jit(run(m))(variables, images)
        (want, stats), (got, own) = apply(model()), apply(model(normed=in_place))
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
        assert jax.tree.structure(stats) == jax.tree.structure(own)

    @pytest.mark.slow
    def test_t5_reads_all_of_its_parameters(self):
        x = jax.random.normal(jax.random.key(2), (1, 6, 16))
        model = T5(SMALL, classes=3)
        params = jax.jit(model.init)(jax.random.key(0), x)["params"]
        logits = lambda params: model.apply({"params": params}, x)
        assert jax.eval_shape(logits, params).shape == (1, 6, 3)
        loss = lambda params: jnp.square(logits(params)).sum()
        grads = jax.jit(jax.grad(loss))(params)
        assert all(jnp.any(g) for g in jax.tree.leaves(grads))
