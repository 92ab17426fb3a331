"""Cross entropy's kernels for Hopper: simulated, and compiled for an H100.

The reference is `implementation="xla"`. Simulated are copies, barriers, loops and
arithmetic; products are not Mosaic's there.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import jaxmem
from jaxmem.ops import linear_cross_entropy
from pallas_kernels import simulated
from pallas_kernels.cross_entropy import LossOptions
from pallas_kernels.cross_entropy import gpu as cross_entropy_gpu
from tests.kernels.test_cross_entropy import (
    EVERYTHING,
    arrays,
    losses,
    outcome,
    step_in_a_shard_map,
)
from tests.sets import some_fast

AVAILABLE = {t.name for t in jaxmem.targets() if t.available}
needs_gpu = pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")
over_edges = pytest.mark.skipif(
    jax.__version_info__ < (0, 11),
    reason="the simulator of jax 0.10.2 refuses copies over an edge, which TMA fills",
)
MIB = 2**20
TABLE = EVERYTHING | {"vocab_axis": 0}


def half(*args, **options):
    return arrays(*args, **{"dtype": "bfloat16"} | options)


def check_equal(args, run=outcome, **options):
    """Against the largest element of the reference's.

    Sums are the same in another order, some tens of roundings; a gradient may then
    round to its other neighbour, which is one step of its dtype away.
    """
    want = run("xla", args, **options)
    with simulated("cuda"):
        got = run("pallas", args, **options)
    for g, w in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert (g.dtype, g.shape) == (w.dtype, w.shape)
        rtol = max(1e-5, float(jnp.finfo(g.dtype).eps))
        g, w = (np.asarray(t, "f8") for t in (g, w))
        assert np.abs(g - w).max() <= rtol * np.abs(w).max()


# -- values and gradients


def with_words_taken_out():
    """Batch axes, and a bias that takes out a whole block of the vocabulary."""
    x, kernel, bias, labels = half(128, 64, 256)
    bias = bias.astype("float32").at[100:].set(-jnp.inf)
    return x.reshape(2, 64, 64), kernel, bias, labels.reshape(2, 64) % 100


CASES = {
    "words taken out": (
        with_words_taken_out(),
        {"dtype": "bfloat16", "where": jnp.arange(128).reshape(2, 64) > 3},
    ),
    "table": (half(256, 128, 384, axis=0), {"block_size": 128} | TABLE),
    "no bias": (half(128, 128, 384, bias=False), {"block_size": 200} | EVERYTHING),
    "float16": (half(128, 64, 256, dtype="float16"), {"softcap": 2.0}),
}


@pytest.mark.parametrize("name", some_fast(CASES, "words taken out", "no bias"))
def test_equals_its_reference(name):
    args, options = CASES[name]
    check_equal(args, **options)


@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_one_program_walks_the_vocabulary(axis, monkeypatch):
    monkeypatch.setattr(cross_entropy_gpu, "PROGRAMS", 2)
    check_equal(half(128, 64, 640, axis=axis), **EVERYTHING | {"vocab_axis": axis})


@over_edges
def test_over_edges():
    check_equal(half(20, 64, 192, axis=0), **TABLE)


@over_edges
@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("axis, words", [(0, 64), (1, 320)])
@pytest.mark.parametrize("tokens", [1, 130])
def test_over_edges_on_other_shapes(tokens, axis, words, x64):
    with jax.enable_x64(x64):
        args = half(tokens, 64, words, axis=axis)
        check_equal(args, **TABLE | {"vocab_axis": axis, "block_size": 128})


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [(0,), (1,), (2,)])
def test_frozen_inputs(wanted):
    check_equal(half(128, 64, 128), wanted=wanted)


@pytest.mark.slow
def test_values_under_vmap():
    def run(implementation, args, **options):
        each = lambda x, labels: outcome(implementation, (x, *args[1:3], labels))
        return jax.vmap(each)(args[0], args[3])

    x, kernel, bias, labels = half(256, 64, 128)
    check_equal((x.reshape(2, 128, 64), kernel, bias, labels.reshape(2, 128)), run)


# -- what is refused

REFUSED = {
    "tensor cores multiply bfloat16 or float16, both alike, not float32 and float32": (
        arrays(8, 64, 64)
    ),
    "not bfloat16 and float32": half(8, 64, 64, kernel_dtype="float32"),
    "features in multiples of 64, not \\(8, 100\\)": half(8, 100, 64),
    "some tokens": (half(8, 64, 64)[0][:0], *half(8, 64, 64)[1:]),
    "vocabularies that 64 divides, not 136: pad the kernel": half(8, 64, 136),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_it_does_is_said(message):
    with pytest.raises(NotImplementedError, match=message):
        cross_entropy_gpu.forward(*REFUSED[message], LossOptions())


# -- compiled for an H100 that is not there


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("axis", [0, 1])
def test_one_block_is_all_there_is(axis):
    """The workspace of 32 MiB, a block of the gradient of x, and numbers of tokens.

    The reference has a sum of 128 MiB for the gradient of x besides its block.
    """
    temp = losses(8192, 4096, 32768, axis=axis, target="h100", label_smoothing=0.1)
    assert temp <= 38 * MIB


@needs_gpu
@pytest.mark.slow
def test_no_logit_leaves_the_forward_pass():
    struct = jax.ShapeDtypeStruct
    x, kernel = (struct(s, "bfloat16") for s in ((8192, 1024), (1024, 32768)))
    loss = functools.partial(linear_cross_entropy, implementation="pallas")
    labels = struct((8192,), "int32")
    temp = jaxmem.estimate(loss, x, kernel, labels, target="h100").temp_bytes
    assert temp <= 4 * 8192 * 4 * 8  # four numbers, of each of up to 8 parts


@needs_gpu
@pytest.mark.slow
@pytest.mark.parametrize("x64", [False, True])
@pytest.mark.parametrize("axis, words", [(0, 1088), (1, 64)])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_compiles_with_every_option(dtype, axis, words, x64):
    with jax.enable_x64(x64):
        options = EVERYTHING | {"return_lse": False, "block_size": 256}
        losses(203, 320, words, axis=axis, dtype=dtype, target="h100", **options)


@pytest.mark.slow
@pytest.mark.parametrize("check_vma", [True, False])
def test_lowers_in_a_shard_map(check_vma):
    x, kernel, _, labels = half(16, 128, 512)
    step = step_in_a_shard_map(check_vma)
    allowed = [export.DisabledSafetyCheck.custom_call("mosaic_gpu_v2")]
    how = {"platforms": ["cuda"], "disabled_checks": allowed}
    text = export.export(step, **how)(x, kernel, labels).mlir_module()
    assert text.count("jaxmem_cross_entropy_gradient") >= 2
