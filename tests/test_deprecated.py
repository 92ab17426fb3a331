"""What 0.1.0 had and 0.2.0 does not: it warns, or says where it went."""

import importlib
import inspect
import re

import jax.numpy as jnp
import pytest

from jaxmem import ops

X = jnp.linspace(-2.0, 2.0, 8)


@pytest.mark.parametrize("op", [ops.swiglu, ops.geglu], ids=lambda op: op.__name__)
@pytest.mark.parametrize("implementation", [None, "xla", "pallas"])
def test_an_ignored_argument_warns_at_the_call(op, implementation):
    words = f"{op.__name__}: implementation is deprecated.*0.4.0: leave it out"
    with pytest.warns(DeprecationWarning, match=words) as told:
        out = op(X, X, implementation=implementation)
    assert jnp.array_equal(out, op(X, X))  # without a warning, which is an error here
    assert [one.filename for one in told] == [__file__]
    assert "implementation" not in inspect.signature(op).parameters


@pytest.mark.parametrize("part", ["linen", "nnx"])
@pytest.mark.parametrize("name", ["LlamaBlock", "TransformerBlock"])
def test_a_name_that_became_an_example_says_where(part, name):
    words = f"jaxmem.nn.{part} has no {name} since jaxmem 0.2.0: "
    with pytest.raises(ImportError, match=words) as raised:
        exec(f"from jaxmem.nn.{part} import {name}")
    (example,) = re.findall(r"examples/(\w+)\.py", str(raised.value))
    assert hasattr(importlib.import_module(f"examples.{example}"), name)
    module = importlib.import_module(f"jaxmem.nn.{part}")
    assert name not in dir(module)
    assert not hasattr(module, "Banana")
