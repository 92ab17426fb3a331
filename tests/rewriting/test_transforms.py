"""Formulas replaced, against the plain ones: dtype x transformation x frozen inputs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxmem import rewriting
from tests import twins
from tests.rewriting.formulas import FORMULAS, Formula
from tests.rewriting.recomputed import attention_errors
from tests.sets import slow_unless

# One of each kind that differs from the others by its pattern, and how it is fast; all
# of them in every way are in the slow suite.
OFTEN = {
    "quick gelu": ("float32", "jit"),
    "hugging face norm": ("float32", "vmap"),
    "linen.BatchNorm": ("bfloat16", "shard_map"),
    "nnx.BatchNorm": ("float32", "scan"),
    "linen.BatchNorm, inference": ("bfloat16", "remat_unrolled"),
    "batch norm by var": ("float32", "remat"),
    "given statistics": ("bfloat16", "jit"),
    "tied head": ("bfloat16", "vmap"),
    "bias subtracted": ("float32", "shard_map"),
    "1 - mask": ("bfloat16", "scan"),
    "three masks": ("float32", "remat_unrolled"),
    "bias after mask": ("bfloat16", "remat"),
    "the opposite of a mask": ("float32", "jit"),
    "two biases": ("float32", "vmap"),
    "a mask in a causal one": ("bfloat16", "shard_map"),
}
# Dropout has another mask; the formulas are written for the usual promotion.
pytestmark = pytest.mark.usefixtures("standard_promotion")


@pytest.fixture
def standard_promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


def twin_of(formula: Formula) -> twins.Twin:
    """The formula as the battery takes it."""

    def args(shape, dtype, rng):
        floats = (jnp.asarray(rng.standard_normal(s), dtype) for s in formula.shapes)
        return (*floats, *formula.others)

    return twins.Twin(
        f"{formula.name}, {formula.id}",
        rewriting.rewrite(formula.fn),
        formula.fn,
        args,
        shapes=((),),
        diff=tuple(range(len(formula.shapes))),
        recomputed=formula.masked and functools.partial(errors_of, formula.masked),
    )


def errors_of(masked, args, g):
    """Attention's logits are at least float32."""
    return attention_errors(masked, args, g, float(jnp.finfo("float32").eps))


TWINS = {f.id: twin_of(f) for f in FORMULAS}
assert OFTEN.keys() <= TWINS.keys()


def _cases():
    """Every formula, dtype and transformation; of some one of each is fast."""
    for id_, twin in TWINS.items():
        for way in itertools.product(twins.DTYPES, sorted(twins.TRANSFORMS)):
            marks = slow_unless(OFTEN.get(id_) == way)
            yield pytest.param(twin, *way, marks=marks, id="-".join((id_, *way)))


@pytest.mark.parametrize(("twin", "dtype", "transform"), [*_cases()])
def test_equals_the_plain_formula(twin, dtype, transform):
    twins.check_equal(twin, (), dtype, transform)


@pytest.mark.slow
@pytest.mark.parametrize("twin", TWINS.values(), ids=TWINS)
def test_with_all_inputs_but_some_frozen(twin):
    for wanted in twins.subsets(twin.diff):
        twins.check_equal(twin, (), "float32", "scan", wanted)


# Several biases are added up: the sum is as large as the probabilities that jax keeps,
# and at these sizes what is kept beside it is as large as what is not.
KEEPS = [i for i in OFTEN if i not in ("two biases", "bias after mask")]


@pytest.mark.parametrize("twin", [TWINS[i] for i in KEEPS], ids=KEEPS)
def test_keeps_no_more_than_plain_whatever_is_frozen(twin):
    args = twin.args((), jnp.dtype("bfloat16"), twins._seed(twin.name))
    for wanted in twins.subsets(twin.diff):
        plain, lean = (
            twins.kept_bytes(fn, args, wanted) for fn in (twin.plain, twin.lean)
        )
        assert lean <= plain, f"{set(wanted)}: {lean} bytes, plain {plain}"
