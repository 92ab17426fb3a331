"""Lean models: nothing is named that the plain ones do not have; the user's lines."""

import functools

import flax.linen as nn
import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem
from benchmarks.models import transformers as models
from benchmarks.models import zoo_transformers
from benchmarks.models.vision import ResNet, ResNetConfig, ViT, ViTConfig
from examples import transformer_blocks as blocks
from examples import transformer_blocks_nnx as blocks_nnx
from jaxmem.linting._subject import levels
from jaxmem.nn import Rule
from jaxmem.nn import linen as lean_linen
from tests.nn import linen_models, nnx_models
from tests.rewriting.formulas import FORMULAS
from tests.sets import one_of, slow_unless, some_fast

SDS = jax.ShapeDtypeStruct
TOKENS = SDS((8, 32), jnp.int32)
HIDDEN = SDS((8, 32, 32), jnp.bfloat16)
SQUARE = SDS((32, 32), jnp.float32)
PIXELS = SDS((4, 32, 32, 3), jnp.float32)
TINY = {"layers": 2, "width": 32, "heads": 4, "hidden": 64}
BERT = models.BertConfig(vocabulary=50, positions=32, **TINY)
GPT = models.StackConfig(kv_heads=4, **TINY)
LLAMA = models.StackConfig(kv_heads=2, dropout=0.0, **TINY)


class Training(nn.Module):
    """A model whose call needs to be told that it trains."""

    model: nn.Module

    @nn.compact
    def __call__(self, x):
        return self.model(x, train=True)


def linen_step(model, x):
    """(gradient of a loss over the model's output, its arguments)."""
    keys = {"params": jax.random.key(0), "dropout": jax.random.key(1)}
    variables = dict(jax.eval_shape(model.init, keys, x))
    params = variables.pop("params")

    def loss(params, rest, x, words):
        rngs = {"dropout": jax.random.wrap_key_data(words)}
        mutable = ["batch_stats"]
        y, _ = model.apply({"params": params, **rest}, x, rngs=rngs, mutable=mutable)
        return jnp.mean(jnp.square(y))

    words = SDS((2,), jnp.uint32)
    return jax.value_and_grad(loss), (params, variables, x, words)


def nnx_step(model, x):
    graph, params, rest = nnx.split(model, nnx.Param, ...)

    def loss(params, rest, x):
        return jnp.mean(jnp.square(nnx.merge(graph, params, rest, copy=True)(x)))

    return jax.value_and_grad(loss), (params, rest, x)


def bert(style, dtype=jnp.bfloat16):
    return linen_models.Bert(width=32, style=style, dtype=dtype, dropout=0.1)


MODELS = {
    "bert, scan": (lambda: bert("scan"), TOKENS),
    "BERT": (lambda: models.Bert(BERT), TOKENS),
    "Llama": (lambda: zoo_transformers.Llama(LLAMA, True), TOKENS),
    "nnx stack": (lambda: nnx_models.Stack(width=32, rngs=nnx.Rngs(0)), TOKENS),
}
MORE_MODELS = {
    "nnx loop": (lambda: nnx_models.Loop(width=32, rngs=nnx.Rngs(0)), TOKENS),
    "GPT-2": (lambda: zoo_transformers.GPT2(GPT, True), TOKENS),
    "gpt": (lambda: linen_models.Gpt(nn.Dense(11), width=32), TOKENS),
    "resnet": (lambda: Training(linen_models.ResNet()), PIXELS),
    "ResNet": (lambda: ResNet(ResNetConfig((1, 1), 8, 10)), PIXELS),
    "ViT": (lambda: ViT(ViTConfig(2, 32, 4, 64, 8, 10)), PIXELS),
    "nnx stack, remat": (
        lambda: nnx_models.Stack(width=32, rngs=nnx.Rngs(0), remat=True),
        TOKENS,
    ),
    **{
        f"bert, {style}, {dtype}": (functools.partial(bert, style, dtype), TOKENS)
        for style in ("loop", "remat", "scan remat")
        for dtype in (None, jnp.bfloat16)
    },
    **{
        f"{model.__name__}, unrolled": (
            functools.partial(model, config, False),
            TOKENS,
        )
        for model, config in (
            (zoo_transformers.MaskedBert, BERT),
            (zoo_transformers.GPT2, GPT),
            (zoo_transformers.Llama, LLAMA),
        )
    },
}
BLOCKS = {
    "pre": lambda: blocks.TransformerBlock(4, 64, dtype=jnp.bfloat16),
    "post": lambda: blocks.TransformerBlock(
        *(4, 64, "post"), dropout_rate=0.1, deterministic=False, dtype=jnp.bfloat16
    ),
    "llama": lambda: blocks.LlamaBlock(4, 64, 2, dtype=jnp.bfloat16),
    "nnx llama": lambda: blocks_nnx.LlamaBlock(
        32, 4, 64, num_kv_heads=2, dtype=jnp.bfloat16, rngs=nnx.Rngs(0)
    ),
}


def lint(model, x):
    step, args = (nnx_step if isinstance(model, nnx.Module) else linen_step)(model, x)
    return jaxmem.lint(step, *args)


def new_findings(make, x, **options):
    """What the substituted model has and the plain one has not."""
    model = make()
    plain = {(f.check, f.what) for f in lint(model, x)}
    return [
        f
        for f in lint(jaxmem.substitute(model, **options), x)
        if (f.check, f.what) not in plain
    ]


@pytest.mark.parametrize("name", some_fast(MODELS, "bert, scan", "nnx stack"))
def test_nothing_is_said_of_a_lean_model_alone(name):
    assert not new_findings(*MODELS[name])


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"save": 8}, {"activations": "auto"}])
@pytest.mark.parametrize(
    ("make", "x"), (MODELS | MORE_MODELS).values(), ids=MODELS | MORE_MODELS
)
def test_nothing_is_said_of_any_lean_model(make, x, options):
    assert not new_findings(make, x, **options)


@pytest.mark.fast("pre", "post", "nnx llama")
@pytest.mark.parametrize("make", BLOCKS.values(), ids=BLOCKS)
def test_nothing_is_said_of_a_block(make):
    assert not len(lint(make(), HIDDEN))


@pytest.mark.parametrize(
    "formula",
    [
        pytest.param(f, id=f"{f.name}: {f.id}", marks=slow_unless(one_of(6, f.id) == 0))
        for f in FORMULAS
    ],
)
def test_nothing_is_said_of_a_formula_replaced(formula):
    """Ops in the place of a formula have the user's line: their scope tells them."""

    def loss(*args):
        y = jaxmem.rewriting.rewrite(formula.fn)(*args)
        return jnp.sum(y.astype(jnp.float32))

    wanted = tuple(range(len(formula.shapes)))
    found = jaxmem.lint(jax.grad(loss, wanted), *formula.args())
    assert not [f for f in found if f.check in ("policy None", "unmatched name")]


class Left(nn.Module):
    """A function that is left as it is."""

    fn: object

    def __call__(self, x):
        return self.fn(x)


def kept_by_name(x):
    return jnp.sin(jax.ad_checkpoint.checkpoint_name(x @ x, "y"))


def checkpoints_round(make):
    """The findings on `make(fn)`, where `fn` has two odd checkpoints in it."""
    policy = jax.checkpoint_policies.save_only_these_names("not there")

    def fn(x):
        x = jax.checkpoint(kept_by_name)(x)
        return jax.checkpoint(kept_by_name, policy=policy)(x)

    found = jaxmem.lint(jax.grad(lambda x: jnp.sum(make(fn)(x))), SQUARE)
    return sorted(f.check for f in found)


def test_a_users_checkpoint_in_the_midst_of_lean_ops_is_told():
    both = ["policy None", "unmatched name"]
    assert checkpoints_round(lambda fn: fn) == both
    lean = lambda fn: lambda x: jaxmem.ops.gelu(fn(jaxmem.ops.gelu(x)))
    assert checkpoints_round(lean) == both
    plain = lambda fn: lambda x: jax.nn.gelu(fn(jax.nn.gelu(x)))
    assert checkpoints_round(lambda fn: jaxmem.substitute(plain(fn))) == both

    def left(fn):
        """By a rule, in a model with a lean layer."""
        model = nn.Sequential([nn.Dense(32), Left(fn)])
        params = jax.eval_shape(model.init, jax.random.key(0), SQUARE)
        params = jax.tree.map(lambda p: jnp.ones(p.shape), params)
        model = jaxmem.substitute(model, rules=[Rule(Left, None)])
        return lambda x: model.apply(params, x)

    assert checkpoints_round(left) == both


class Twice(nn.Module):
    """A model whose lines are told apart, with a wide copy on one of them."""

    @nn.compact
    def __call__(self, x):
        y = nn.Dense(32, dtype=jnp.bfloat16)(x)
        y = jnp.square(y.astype(jnp.float32)).astype(jnp.bfloat16)  # the line
        return nn.Dense(32, dtype=jnp.bfloat16)(y)


def line_of(text):
    with open(__file__) as file:
        return 1 + next(i for i, line in enumerate(file) if text in line)


def test_a_finding_is_where_the_users_module_has_it():
    """Not where the model is applied, and not in the library that applies it."""
    for model in (Twice(), jaxmem.substitute(Twice())):
        (found,) = lint(model, HIDDEN).of("wide copy")
        line = line_of("# the line")
        assert found.where == f"{__file__}:{line} (Twice.__call__)"
        assert found.path == "Twice"


class Remat(nn.Module):
    """Checkpoints that Flax makes, in a scan and not."""

    scanned: bool

    @nn.compact
    def __call__(self, x):
        if not self.scanned:
            return nn.remat(nn.Dense)(32)(x)  # not scanned
        scan = nn.scan(
            lambda module, x, _: (nn.remat(nn.Dense)(32)(x), None),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=2,
        )
        return scan(self, x, None)[0]  # scanned


@pytest.mark.parametrize("scanned", [False, True])
def test_a_checkpoint_of_flax_is_where_the_user_asks_for_it(scanned):
    (found,) = lint(Remat(scanned), HIDDEN.update(dtype=jnp.float32)).of("policy None")
    assert __file__ in found.where and "Remat.__call__" in found.where
    assert "Remat/Remat/" not in f"{found.path}/"


def test_what_a_layer_of_ours_does_is_where_it_is_called():
    """There is no line of the user's in it but the call."""
    step, args = linen_step(lean_linen.MultiHeadAttention(4), HIDDEN)
    wrong = [
        f"{eqn.primitive}: {level.source(eqn)}"
        for level in levels(jax.make_jaxpr(step)(*args))
        for eqn in level.graph.eqns
        if not level.source(eqn).startswith(__file__)
    ]
    assert not wrong


def test_a_stack_of_the_users_own_is_told_beside_an_op():
    """What a norm of ours gives, kept for its reader, and returned as well."""

    def loss(weights, x):
        def step(x, w):
            y = jaxmem.ops.layer_norm(x @ w, save="output")
            return y, y

        y, ys = jax.lax.scan(step, x, weights)
        return jnp.sum(y) + jnp.sum(ys[:, :2])

    args = SDS((4, 32, 32), jnp.float32), SDS((64, 32), jnp.float32)
    step = jax.value_and_grad(loss)
    (found,) = jaxmem.lint(step, *args).of("stacked twice")
    assert found.bytes == 4 * 64 * 32 * 4
