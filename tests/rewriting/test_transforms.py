"""Formulas replaced, against the plain ones: dtype x transformation x frozen inputs."""

import functools
import itertools

import jax
import jax.numpy as jnp
import pytest

from jaxmem import rewriting
from tests import references
from tests.arrays import array
from tests.rewriting.formulas import FORMULAS, Formula
from tests.rewriting.recomputed import attention_errors
from tests.sets import one_of, slow_unless

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


def comparison_of(formula: Formula) -> references.Comparison:
    """The formula as the battery takes it."""

    def args(shape, dtype, rng):
        floats = (array(rng.standard_normal(s), dtype) for s in formula.shapes)
        return (*floats, *formula.others)

    return references.Comparison(
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


COMPARISONS = {f.id: comparison_of(f) for f in FORMULAS}
assert OFTEN.keys() <= COMPARISONS.keys()


def _cases():
    """Every formula, dtype and transformation; of some one of each is fast."""
    for id_, comparison in COMPARISONS.items():
        for variant in itertools.product(
            references.DTYPES, sorted(references.TRANSFORMS)
        ):
            marks = slow_unless(OFTEN.get(id_) == variant)
            yield pytest.param(
                comparison, *variant, marks=marks, id="-".join((id_, *variant))
            )


@pytest.mark.parametrize(("comparison", "dtype", "transform"), [*_cases()])
def test_equals_the_plain_formula(comparison, dtype, transform):
    references.check_equal(comparison, (), dtype, transform)


@pytest.mark.slow
@pytest.mark.parametrize("comparison", COMPARISONS.values(), ids=COMPARISONS)
def test_with_all_inputs_but_some_frozen(comparison):
    for wanted in references.subsets(comparison.diff):
        references.check_equal(comparison, (), "float32", "scan", wanted)


# Several biases are added up: the sum is as large as the probabilities that jax keeps,
# and at these sizes what is kept beside it is as large as what is not.
KEEPS = [i for i in OFTEN if i not in ("two biases", "bias after mask")]


@pytest.mark.fast("quick gelu", "linen.BatchNorm", "1 - mask", "three masks")
@pytest.mark.parametrize(
    "comparison",
    [
        pytest.param(COMPARISONS[i], marks=slow_unless(one_of(2, i) == 0), id=i)
        for i in KEEPS
    ],
)
def test_keeps_no_more_than_plain_whatever_is_frozen(comparison):
    args = comparison.args((), jnp.dtype("bfloat16"), references._seed(comparison.name))
    for wanted in references.subsets(comparison.diff):
        plain, lean = (
            references.kept_bytes(fn, args, wanted)
            for fn in (comparison.plain, comparison.lean)
        )
        assert lean <= plain, f"{set(wanted)}: {lean} bytes, plain {plain}"
