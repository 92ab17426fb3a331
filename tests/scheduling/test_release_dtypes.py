"""Reductions of a released stack, in every dtype that jax has on CPU.

The values are small whole numbers, the same in any order of summation: results are
equal to the bit.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxmem import schedule
from jaxmem.ir import jaxprs
from tests.scheduling.problem import copy, jitted

# One column in which all are positive, one in which all are negative.
DATA = jnp.asarray([[1, -1, 2], [2, -2, -1], [1, -1, 1]], jnp.float32)

FLOATS = """float4_e2m1fn float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn
float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu bfloat16 float16 float32
complex64""".split()
INTEGERS = """bool int2 uint2 int4 uint4 int8 uint8 int16 uint16 int32 uint32""".split()
NUMBERS, LOGIC = ("sum", "prod", "max", "min"), ("and", "or", "xor")
CANNOT = {"bool": ("sum", "prod"), "complex64": ("max", "min")}
NO_ARGMAX = ("complex64", "int2", "uint2")  # XLA for CPU refuses those of two bits


def cast(x, dtype):
    """To the nearest that an integer type has: what is beyond depends on the device."""
    if jnp.issubdtype(dtype, jnp.integer):
        info = jnp.iinfo(dtype)
        x = jnp.clip(x, float(info.min), float(info.max))
    return x.astype(dtype)


def reductions(x) -> dict[str, jax.Array]:
    """Over the layers, and over each layer by itself."""
    name = str(x.dtype)
    bits = name == "bool" or name.removeprefix("u") in ("int8", "int16", "int32")
    kinds = [k for k in NUMBERS if k not in CANNOT.get(name, ())]
    kinds += LOGIC if bits else ()
    reduce = {k: getattr(lax, f"reduce_{k}") for k in kinds}
    found = {f"{k} over layers": fn(x, (0,)) for k, fn in reduce.items()}
    found |= {f"{k} over all": fn(x, (0, 1)) for k, fn in reduce.items()}
    found |= {
        f"{k} of each, over layers": fn(fn(x, (1,)), (0,)) for k, fn in reduce.items()
    }
    if name not in NO_ARGMAX:
        found["argmax of each, summed"] = jnp.sum(lax.argmax(x, 1, jnp.int32))
        found["argmin of each, summed"] = jnp.sum(lax.argmin(x, 1, jnp.int32))
    return found


def wide(x) -> np.ndarray:
    """As numpy compares it: NaN is NaN."""
    plain = x.dtype in (bool, "complex64")
    return np.asarray(x if plain else x.astype(jnp.float32))


def run(fn, *args):
    """With all passes of LLVM: without them a minimum of uint2 comes out wrong."""
    return jitted(fn).lower(*args).compile({"xla_backend_optimization_level": 3})(*args)


def step_of(dtype):
    def loss(params, x):
        layer = lambda x, w: (x + w[0] * w[1], None)  # a layer's gradient is data
        return jnp.sum(lax.scan(layer, x, (params, DATA))[0])

    def step(params, x):
        grads = jax.grad(loss)(params, x)
        return params - grads, reductions(cast(grads, dtype))

    return step


FAST = ("float8_e4m3fn", "float8_e8m0fnu", "bool", "uint4")
CASES = [
    name if name in FAST else pytest.param(name, marks=pytest.mark.slow)
    for name in FLOATS + INTEGERS
]


@pytest.mark.fast("float8_e8m0fnu", "bool")
@pytest.mark.parametrize("name", CASES)
def test_reductions_of_every_dtype(name):
    args = jnp.zeros_like(DATA), jnp.ones(3)
    step = step_of(jnp.dtype(name))
    scheduled = schedule(step, donate_argnums=0)
    plan = scheduled.plan(*args)
    assert (plan.released_bytes, plan.kept_bytes) == (DATA.nbytes, 0)
    want, got = (run(fn, *copy(args)) for fn in (step, scheduled))
    np.testing.assert_array_equal(got[0], want[0])
    for kind, x in want[1].items():
        assert got[1][kind].dtype == x.dtype
        np.testing.assert_array_equal(wide(got[1][kind]), wide(x), err_msg=kind)


@pytest.mark.parametrize("name", ["float6_e2m3fn", "float6_e3m2fn", "int1"])
def test_dtypes_that_the_cpu_does_not_have_are_rewritten(name):
    """Nothing is run: XLA for CPU ends the process where it meets one of them."""
    args = jnp.zeros_like(DATA), jnp.ones(3)
    scheduled = schedule(step_of(jnp.dtype(name)), donate_argnums=0)
    assert scheduled.plan(*args).kept_bytes == 0
    assert any(
        e.primitive.name == "scan" for e in jaxprs.walk(scheduled.trace(*args).jaxpr)
    )
