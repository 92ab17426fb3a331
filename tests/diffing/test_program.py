"""A step written as plain JAX is the same step: equations, bytes and values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxmem
from jaxmem.diffing._expressions import UnwritableError
from jaxmem.diffing._program import Program, loaded, script
from jaxmem.ops import dropout
from tests.diffing.steps import plain, remat

X = np.linspace(-1, 1, 32, dtype=np.float32).reshape(4, 8)


def _loops(x):
    """A `while`, a `switch` on what it computes, and a scan that reads both."""
    count = lax.while_loop(lambda n: n < 3, lambda n: n + 1, jnp.int32(0))
    scale = lax.switch(count, [jnp.sin, jnp.cos, lambda x: x], x)
    carry = lambda c, row: (c + row * scale[0], c)
    return lax.scan(carry, jnp.zeros(8), x, reverse=True, unroll=2)


def _lookups(x):
    order = jnp.argsort(x[:, 0])
    rows = x[order].at[order].add(jnp.ones((4, 8)))
    return rows, jnp.cumsum(rows, 1), jnp.argmax(rows, 1), lax.top_k(rows, 2)[0]


def _convolution(x):
    image, kernel = x.reshape(1, 1, 4, 8), jnp.ones((2, 1, 3, 3))
    out = lax.conv_general_dilated(image, kernel, (1, 2), "SAME")
    return lax.reduce_window(out, -jnp.inf, lax.max, (1, 1, 2, 2), (1, 1, 2, 2), "SAME")


def _own_dropout(x):
    return dropout(x, 0.5, jax.random.key(3)) * x


def _dropout(x):
    mask = jax.random.bernoulli(jax.random.key(3), 0.5, x.shape)
    return jnp.where(mask, x, 0.0) * jax.nn.gelu(x)


def _low_precision(x):
    y = x.astype(jnp.bfloat16)
    product = jnp.dot(y, y.T, preferred_element_type=jnp.float32)
    return jax.nn.softmax(y) * jnp.bfloat16(0.1), product, jnp.full((2,), jnp.nan)


FUNCTIONS = [_loops, _lookups, _convolution, _dropout, _own_dropout, _low_precision]
GRADIENT = jax.grad(lambda x: sum(jnp.sum(y**2) for y in _loops(x)))


@pytest.mark.parametrize("fn", [*FUNCTIONS, GRADIENT], ids=lambda f: f.__name__)
def test_the_text_computes_the_same(fn):
    program = Program.of_step(fn, (X,), {})
    written, args, _ = loaded(program.text())
    (given,) = args
    assert (given.shape, given.dtype) == (X.shape, X.dtype)
    # `lax.switch` clamps an index, whether or not that has been done
    names = lambda p: [e[0] for e in p.equations if e[0] != "clamp"]
    assert names(Program.of_text(program.text())) == names(program)
    found, expected = jax.jit(written)(X), jax.tree.leaves(jax.jit(fn)(X))
    for one, other in zip(found, expected, strict=True):
        assert one.dtype == other.dtype
        # one program, but XLA may be given its operations in another order
        limit = 8 * float(jnp.finfo(one.dtype).eps) if one.dtype.kind in "fV" else 0
        np.testing.assert_allclose(one, other, rtol=limit, atol=limit)


@pytest.mark.parametrize("make", [remat, plain])
def test_the_text_takes_the_same_bytes(make):
    step, args, options = make()
    written, specs, donated = loaded(Program.of_step(step, args, options).text())
    assert donated == [0]
    report = jaxmem.estimate(step, *args, **options)
    other = jaxmem.estimate(written, *specs, donate_argnums=tuple(donated))
    assert other.temp_bytes == report.temp_bytes
    assert other.alias_bytes == report.alias_bytes


def test_what_is_removed_in_a_loop_is_an_argument_of_the_program():
    program = Program.of_step(*plain())
    (tanh, *_) = (i for i, e in enumerate(program.equations) if e[0] == "tanh")
    smaller = Program.of_text(program.text(removed={tanh}))
    count = lambda p: sum(e[0] == "tanh" for e in p.equations)
    assert count(smaller) == count(program) - 1
    assert len(smaller.closed.jaxpr.invars) == len(program.closed.jaxpr.invars) + 1


def test_dead_code_goes_with_an_output():
    fn = lambda x: (jnp.sin(x), jnp.cos(x))
    program = Program.of_step(fn, (X,), {})
    smaller = Program.of_text(program.text(outputs=[1]))
    assert [e[0] for e in smaller.equations] == ["cos"]


def test_what_cannot_be_written_is_named():
    def fn(x):
        return jax.pure_callback(lambda x: x, jax.ShapeDtypeStruct(X.shape, X.dtype), x)

    with pytest.raises(UnwritableError, match="'pure_callback' cannot be written"):
        Program.of_step(fn, (X,), {}).text()


def test_a_script_imports_what_it_needs():
    text = Program.of_step(_low_precision, (X,), {}).text()
    assert "import numpy as np" in script("x", {"step": text})
    text = Program.of_step(jnp.sin, (X,), {}).text()
    assert "numpy" not in script("x", {"step": text})
