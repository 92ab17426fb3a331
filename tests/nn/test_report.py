"""What the backward pass keeps after a substitution, formula by formula."""

import html
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import jaxmem
from jaxmem.nn import Rule, report
from jaxmem.nn._call import linen_call
from jaxmem.nn._remaining import kept_by

X = jax.ShapeDtypeStruct((8, 64), jnp.float32)
SIZE = 8 * 64 * 4


@pytest.fixture(autouse=True)
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def odd(x):
    """No op of ours: keeps the sigmoid and its derivative, beside x."""
    return x * jax.nn.sigmoid(-1.5 * x)


def line_of(text):
    with open(__file__) as file:
        return 1 + next(i for i, line in enumerate(file) if text in line)


class Odd(nn.Module):
    @nn.compact
    def __call__(self, x):
        for _ in range(3):
            x = odd(nn.Dense(64)(x))
        return nn.gelu(nn.Dense(128)(x))


class OddNnx(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(64, 64, rngs=rngs)

    def __call__(self, x):
        return jax.nn.gelu(odd(self.dense(x)))


class FlaxConv1D(nn.Module):
    """As the Flax GPT-2 of transformers has it: a kernel of (features, inputs)."""

    features: int

    @nn.compact
    def __call__(self, x):
        shape = self.features, x.shape[-1]
        kernel = self.param("kernel", nn.initializers.normal(0.02), shape)
        bias = self.param("bias", nn.initializers.zeros, self.features)
        kernel = jnp.asarray(kernel.transpose(), jnp.bfloat16)
        y = jax.lax.dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))
        return y + jnp.asarray(bias, jnp.bfloat16)[None]


class Gpt2Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        x = jax.nn.gelu(FlaxConv1D(256, name="c_fc")(x))
        return FlaxConv1D(64, name="c_proj")(x)


def test_dense_layers_of_other_libraries_are_listed():
    """And keep no cast, transposed copy of their kernels."""
    x = jax.ShapeDtypeStruct(X.shape, jnp.bfloat16)
    fn, args = linen_call(Gpt2Mlp(), (x,), None, {})
    plain = kept_by(fn, *args).total_bytes
    found = report(jaxmem.substitute(Gpt2Mlp()), x)
    lines = [line for line in found.patterns if line.startswith("dense in ")]
    assert [line.split("/")[-1] for line in lines] == ["c_fc, 1 x", "c_proj, 1 x"]
    # of gelu its output and a bit; plain also the second kernel, as x is not trained
    hidden = 8 * 256
    assert found.residuals.total_bytes == 2 * hidden + hidden // 8
    assert plain > found.residuals.total_bytes + 64 * 256 * 2 and not found.left


class Bottleneck(nn.Module):
    """Of a ResNet: statistics of the batch, averaged as well."""

    @nn.compact
    def __call__(self, x):
        norm = partial(nn.BatchNorm, use_running_average=False, dtype=x.dtype)
        conv = partial(nn.Conv, use_bias=False, dtype=x.dtype)
        y = nn.relu(norm()(conv(8, (1, 1))(x)))
        y = nn.relu(norm()(conv(8, (3, 3))(y)))
        return nn.relu(norm()(conv(32, (1, 1))(y)) + norm()(conv(32, (1, 1))(x)))


@pytest.mark.slow
def test_batch_norm_in_functions_keeps_what_its_module_keeps():
    """The statistics are read for the average too: they are recomputed for it."""
    x = jax.ShapeDtypeStruct((4, 16, 16, 16), jnp.bfloat16)
    init = partial(jax.eval_shape, Bottleneck().init, jax.random.key(0))
    variables = dict(init(x))
    args = variables["params"], variables["batch_stats"], x

    def step(model):
        def fn(params, stats, x):
            both = {"params": params, "batch_stats": stats}
            return model.apply(both, x, mutable=["batch_stats"])

        return fn

    by_function = jaxmem.substitute(step(Bottleneck()))
    plain, modules, function = (
        kept_by(fn, *args).total_bytes
        for fn in (
            step(Bottleneck()),
            step(jaxmem.substitute(Bottleneck())),
            by_function,
        )
    )
    assert function == modules < plain / 3
    lines = [x for x in report(by_function).patterns if x.startswith("batch_norm")]
    assert len(lines) == 4


class Tied(nn.Module):
    """One embedding for both ends, as the Flax models of transformers tie it."""

    dtype: str
    how: str

    @nn.compact
    def __call__(self, ids):
        embed = nn.Embed(512, 64, dtype=self.dtype, name="embed")
        x = nn.Dense(64, dtype=self.dtype)(embed(ids))
        if self.how == "attend":
            return embed.attend(x)
        kernel = embed.variables["params"]["embedding"].T
        head = nn.Dense(512, use_bias=False, dtype=self.dtype, parent=None)
        return head.apply({"params": {"kernel": kernel}}, x)


@pytest.mark.fast("float32-apply", "bfloat16-attend")
@pytest.mark.parametrize("how", ["apply", "attend"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tied_head_keeps_no_copy_of_the_embedding(how, dtype):
    """Neither a transposed nor a cast one; what it computes stays the same."""
    model, ids = Tied(dtype, how), jnp.arange(16).reshape(2, 8) * 31
    found = report(jaxmem.substitute(model), jax.ShapeDtypeStruct((2, 8), jnp.int32))
    assert [line for line in found.patterns if line.startswith("dense")]
    # what the products read and the indices; the embedding has 32,768 elements
    size = jnp.dtype(dtype).itemsize
    assert found.residuals.total_bytes == 2 * 16 * 64 * size + 64
    variables = model.init(jax.random.key(0), ids)

    def run(model):
        loss = lambda v: jnp.sin(model.apply(v, ids).astype("float32")).sum()
        return jax.jit(jax.grad(loss))(variables)

    # the same products in the same dtype: one rounding of it on the way
    tolerance = 4 * float(jnp.finfo(dtype).eps)
    plain, lean = (jax.tree.leaves(run(m)) for m in (model, jaxmem.substitute(model)))
    for a, b in zip(plain, lean, strict=True):
        np.testing.assert_allclose(b, a, rtol=tolerance, atol=tolerance * abs(a).max())


def test_what_is_not_recognised_is_named_with_bytes_formula_and_line():
    lean = jaxmem.substitute(lambda x: jax.nn.gelu(odd(x)), activations="output")
    found = report(lean, X)
    rows = {row.formula: row for row in found.left}
    assert set(rows) == {
        "sigmoid(-1.5 * x)",
        "sigmoid(-1.5 * x) * (1 - sigmoid(-1.5 * x))",
    }
    place = f"{__file__}:{line_of('return x * jax.nn.sigmoid(-1.5 * x)')} (odd)"
    for row in found.left:
        assert (row.bytes, row.array, row.count) == (SIZE, "float32[8,64]", 1)
        assert row.source == place
    # gelu keeps its output and a bit
    assert found.residuals.lean_bytes == SIZE + SIZE // 32
    assert found.residuals.total_bytes == found.residuals.lean_bytes + 2 * SIZE


def test_what_is_recognised_is_not():
    lean = jaxmem.substitute(lambda x: x * jax.nn.sigmoid(1.702 * x))
    found = report(lean, X)
    assert len(found.patterns) == 1 and not found.left and not found.patterns_left


def test_layers_are_one_row_and_the_largest_come_first():
    found = report(jaxmem.substitute(Odd()), X)
    counts = {row.formula: (row.count, row.bytes) for row in found.left}
    assert counts["sigmoid(-1.5 * x)"] == (3, 3 * SIZE)
    sizes = [row.bytes for row in found.left]
    assert sizes == sorted(sizes, reverse=True)
    assert all("Odd" in row.path for row in found.left)


def test_of_an_nnx_model():
    model = jaxmem.substitute(OddNnx(nnx.Rngs(0)), activations="output")
    found = report(model, X)
    assert [row.bytes for row in found.left] == [SIZE] * 2
    assert all(row.formula.startswith("sigmoid(-1.5 *") for row in found.left)
    assert found.residuals.lean_bytes >= SIZE


def test_tables_of_what_is_left(tmp_path):
    """Printed, in a notebook, and as files: the same cells."""
    found = report(jaxmem.substitute(Odd(), [Rule("[none]", None)]), X)
    for name in ("a.html", "a.txt"):
        found.save(tmp_path / name)
    page, text = ((tmp_path / name).read_text() for name in ("a.html", "a.txt"))
    assert text == f"{found}\n" and found._repr_html_() in page
    for cell in (
        *("kept for the backward pass", "6.00 KiB in 3", "sigmoid(-1.5 * x)"),
        *("test_report.py", "Dense_0", "rule &#x27;[none]&#x27;"),
    ):
        assert cell in page and html.unescape(cell) in text


def test_arguments_that_are_no_arrays_stay_as_they_are():
    def fn(x, how, *, twice):
        assert how == "odd" and twice is True
        return odd(jax.nn.gelu(x))

    found = report(jaxmem.substitute(fn), X, "odd", twice=True)
    assert [row.bytes for row in found.left] == [SIZE] * 2


def test_nothing_is_said_where_nothing_is_known():
    """Before a trace with arguments, and of what has nothing to differentiate."""
    lean = jaxmem.substitute(lambda x: jax.nn.gelu(x))
    assert report(lean).residuals is None and report(lean).left == ()
    lean = jaxmem.substitute(lambda x: jax.nn.gelu(jnp.zeros((8, 64)) + odd(x)))
    with pytest.warns(UserWarning, match="nothing to replace"):
        found = report(lean, jax.ShapeDtypeStruct((8, 64), jnp.int32))
    assert found.residuals is None and found.left == ()
