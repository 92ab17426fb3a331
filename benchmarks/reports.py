"""The memory reports that docs/ shows, compiled for an H100.

    python -m benchmarks.reports [NAME ...]

Each case is a small train step with one thing that fills its memory; "lint" is what
examples/lint.py prints. A report is written to results/reports/, below the command, the
versions and the commit.
"""

import contextlib
import functools
import io
import runpy
import sys
import tempfile
from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax

import jaxmem
from benchmarks._common import RESULTS, commit, versions
from benchmarks.steps.train import train_step

TARGET = "h100"
FOLDER = RESULTS / "reports"
ROOT = RESULTS.parent.parent
BATCH, LENGTH, WIDTH, LAYERS, WORDS = 16, 512, 512, 8, 131_072
MIXED = {"dtype": jnp.bfloat16}


class Case(NamedTuple):
    """A step, the shapes of its arguments, and those that it may overwrite."""

    step: Callable
    arguments: tuple[Any, ...]
    donated: tuple[int, ...] = (0,)


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.MultiHeadDotProductAttention(num_heads=8, **MIXED)(nn.LayerNorm()(x))
        x = x + y
        y = nn.gelu(nn.Dense(4 * WIDTH, **MIXED)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH, **MIXED)(y), None


class Encoder(nn.Module):
    @nn.compact
    def __call__(self, x):
        split = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        return nn.scan(Block, length=LAYERS, **split)(name="layers")(x, None)[0]


class Perceptron(nn.Module):
    """Large weights, small activations."""

    @nn.compact
    def __call__(self, x):
        for _ in range(4):
            x = x + nn.Dense(4096)(nn.relu(x))
        return x


def case(loss_fn: Callable, make: Callable, tx, batch, donated=(0,)) -> Case:
    def make_state():
        params = make(jax.random.key(0))
        return params, tx.init(params)

    arguments = jax.eval_shape(make_state), batch
    return Case(train_step(loss_fn, tx), arguments, donated)


def shape(*axes: int, dtype: str = "float32") -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(axes, dtype)


def of_module(module: nn.Module, batch, tx, donated=(0,)) -> Case:
    def loss_fn(params, x):
        return jnp.mean(module.apply({"params": params}, x).astype("float32") ** 2)

    make = lambda key: module.init(key, jnp.zeros(batch.shape))["params"]
    return case(loss_fn, make, tx, batch, donated)


def head() -> Case:
    """The logits of a large vocabulary are the largest arrays by far."""

    def loss_fn(params, batch):
        x, labels = batch
        logits = x @ params["table"].T
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
        return jnp.mean(losses)

    make = lambda key: {"table": jax.random.normal(key, (WORDS, WIDTH))}
    tokens = BATCH * LENGTH // 4
    batch = shape(tokens, WIDTH), shape(tokens, dtype="int32")
    return case(loss_fn, make, optax.sgd(1e-3), batch)


ADAM = optax.adamw(1e-3)
SUMS = optax.MultiSteps(ADAM, 8).gradient_transformation()
TOKENS, FEW = shape(BATCH, LENGTH, WIDTH), shape(16, 4096)
CASES: dict[str, Callable[[], Case]] = {
    "activations": lambda: of_module(Encoder(), TOKENS, ADAM),
    "substituted": lambda: of_module(jaxmem.substitute(Encoder()), TOKENS, ADAM),
    "optimizer": lambda: of_module(Perceptron(), FEW, ADAM),
    "accumulation": lambda: of_module(Perceptron(), FEW, SUMS),
    "not_donated": lambda: of_module(Perceptron(), FEW, ADAM, donated=()),
    "head": head,
}
EXAMPLES = ("lint", "advise", "explain", "live_memory")


@functools.cache
def report(name: str) -> jaxmem.memory.MemoryReport:
    step, arguments, donated = CASES[name]()
    return jaxmem.estimate(step, *arguments, target=TARGET, donate_argnums=donated)


def text(name: str) -> str:
    """What is printed, with paths as they are in the repository."""
    if name in CASES:
        return f"{report(name)}\n"
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),  # where an example writes its files
    ):
        runpy.run_path(str(ROOT / "examples" / f"{name}.py"))
    return printed.getvalue().replace(f"{ROOT}/", "")


def main() -> None:
    known = *CASES, *EXAMPLES
    if unknown := set(sys.argv[1:]) - set(known):
        sys.exit(f"unknown: {', '.join(unknown)}; known: {', '.join(known)}")
    FOLDER.mkdir(exist_ok=True)
    for name in sys.argv[1:] or known:
        path = FOLDER / f"{name}.txt"
        made = f"# python -m benchmarks.reports, commit {commit()}\n# {versions()}\n"
        path.write_text(f"{made}{text(name)}")
        print(f"wrote {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
