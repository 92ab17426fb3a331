"""Formulas changed at random: what is replaced gives the values that it gave.

A formula with another sign, number, operation or order of operands is another function,
or the same one written otherwise. Which it is the values say: only what is not replaced
may be anything.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxmem.rewriting import find, rewrite
from tests.arrays import array
from tests.sets import some_fast

X = array(np.random.default_rng(2).uniform(-3, 3, (4, 8)), jnp.float32)
# Of functions of numbers up to 3 in float32, whose formulas round at some ten places.
RTOL = 64 * 2.0**-23

ONE = {
    "neg": jnp.negative,
    "exp": jnp.exp,
    "tanh": jnp.tanh,
    "logistic": jax.nn.sigmoid,
    "erf": jax.lax.erf,
    "square": jnp.square,
    "log1p of exp": lambda x: jnp.log1p(jnp.exp(x)),
    "greatest": lambda x: jnp.max(x, -1, keepdims=True),
    "sum": lambda x: jnp.sum(x, -1, keepdims=True),
    "mean": lambda x: jnp.mean(x, -1, keepdims=True),
    "sum of columns": lambda x: jnp.sum(x, 0, keepdims=True),
    "rsqrt": jax.lax.rsqrt,
}
TWO = {
    "add": jnp.add,
    "sub": jnp.subtract,
    "mul": jnp.multiply,
    "div": jnp.divide,
    "max": jnp.maximum,
    "min": jnp.minimum,
}
NUMBERS = (-np.inf, -1.0, 0.0, 0.5, 1.0, 2.0, np.inf)

# "x", a number, or an operation and its operands
SIGMOID = ("div", 1.0, ("add", 1.0, ("exp", ("neg", "x"))))
CUBE = ("mul", 0.044715, ("mul", "x", ("mul", "x", "x")))
INNER = ("mul", (2 / np.pi) ** 0.5, ("add", "x", CUBE))
SHIFTED = ("exp", ("sub", "x", ("greatest", "x")))
CENTRED = ("sub", "x", ("mean", "x"))
VARIANCE = ("add", 1e-6, ("mean", ("square", CENTRED)))
FORMULAS = {
    "silu": ("div", "x", ("add", 1.0, ("exp", ("neg", "x")))),
    "silu of sigmoid": ("mul", "x", SIGMOID),
    "gelu": ("mul", ("mul", 0.5, "x"), ("add", 1.0, ("tanh", INNER))),
    "exact gelu": (
        "mul",
        ("mul", 0.5, "x"),
        ("add", 1.0, ("erf", ("mul", 0.5**0.5, "x"))),
    ),
    "mish": ("mul", "x", ("tanh", ("log1p of exp", "x"))),
    "softmax": ("div", SHIFTED, ("sum", SHIFTED)),
    "norm": ("mul", CENTRED, ("rsqrt", VARIANCE)),
    "norm of squares": (
        "mul",
        "x",
        ("rsqrt", ("add", 1e-6, ("mean", ("square", "x")))),
    ),
}


def value(expression, x):
    if isinstance(expression, str):
        return x
    if isinstance(expression, float):
        return jnp.full_like(x, expression)
    name, *operands = expression
    return (ONE | TWO)[name](*(value(e, x) for e in operands))


def places(expression, at=()):
    yield at
    if isinstance(expression, tuple):
        for k, operand in enumerate(expression[1:], 1):
            yield from places(operand, (*at, k))


def replaced(expression, at, change):
    if not at:
        return change(expression)
    k, *rest = at
    new = replaced(expression[k], rest, change)
    return (*expression[:k], new, *expression[k + 1 :])


def changed(expression, rng):
    """The expression with one change somewhere."""
    pick = lambda options: list(options)[rng.integers(len(options))]
    number = float(pick(NUMBERS))
    around = [
        lambda e: (pick(TWO), e, number),
        lambda e: (pick(TWO), number, e),
        lambda e: ("neg", e),
    ]

    def own(e):
        if isinstance(e, float):
            return pick([-e, 2 * e, e + 1, 1 / (e or 1.0)])
        if isinstance(e, str):
            return ("neg", e)
        name, *operands = e
        if len(operands) == 1:
            return pick(ONE), *operands
        return pick([(name, *operands[::-1]), (pick(TWO), *operands)])

    all_places = list(places(expression))
    at = all_places[rng.integers(len(all_places))]
    return replaced(expression, at, pick([*around, own, own, own]))


def near(seed: int):
    """Formulas as they are, and with one change or two."""
    rng = np.random.default_rng(seed)
    for formula in FORMULAS.values():
        yield formula
        for _ in range(3):
            one = changed(formula, rng)
            yield one
            yield changed(one, rng)


@pytest.mark.parametrize("seed", some_fast(range(16), 0))
def test_what_is_replaced_gives_the_values_that_it_gave(seed):
    expressions = list(near(seed))

    def fn(x):
        return [value(e, x) for e in expressions]

    replacements = find(fn, X).replaced
    assert len(replacements) >= len(FORMULAS)
    wanted, got = jax.jit(lambda x: (fn(x), rewrite(fn)(x)))(X)
    for expression, a, b in zip(expressions, wanted, got, strict=True):
        scale = np.max(np.abs(a), where=np.isfinite(a), initial=0)
        np.testing.assert_allclose(b, a, RTOL, RTOL * scale, err_msg=str(expression))
