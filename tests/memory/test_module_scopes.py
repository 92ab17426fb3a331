"""Modules of nnx have their paths in a report, and ops do not hide the user's."""

import threading

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

import jaxmem
from jaxmem._module_path import of_user, ops_in, parse_op_name
from jaxmem.frameworks import module_scopes
from jaxmem.memory import residuals

X = jnp.ones((8, 4))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4, 8, rngs=rngs)
        self.down = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Block(rngs) for _ in range(4)])
        self.head = nnx.Linear(4, 2, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


@pytest.fixture(scope="module")
def net():
    return Net(nnx.Rngs(0))


def paths(fn, *args):
    return {e.path for e in residuals(fn, *args) if e.kind == "intermediate"}


def test_nnx_modules_are_named_as_those_of_linen(net):
    found = paths(lambda x: jnp.sum(net(x) ** 2), X)
    assert {"Net/layers/0", "Net/layers/3"} <= found
    assert "Net/layers/0/up" in found and "Net/layers/3/up" in found


@pytest.mark.slow
def test_modules_that_a_transform_has_made_anew(net):
    """`nnx.grad` and `nnx.jit` trace copies of the modules."""

    @nnx.jit
    def step(model, x):
        gradient = nnx.grad(lambda m: jnp.sum(m(x) ** 2))(model)
        nnx.update(model, jax.tree.map(lambda p, g: p - g, *states(model, gradient)))

    def states(model, gradient):
        return nnx.state(model, nnx.Param), gradient

    report = jaxmem.estimate(step, net, X)
    groups = {b.group for b in report.at_peak}
    assert "Net/layers/2" in groups
    assert "4 x Net/layers/*" in str(report)


def test_a_module_alone_is_named_by_its_class(net):
    assert "Block/up" in paths(lambda x: jnp.sum(net.layers[1](x)), X)


def test_classes_are_as_they_were():
    call = vars(Block)["__call__"]
    with module_scopes(), module_scopes():
        assert vars(Block)["__call__"] is not call
    assert vars(Block)["__call__"] is call
    with pytest.raises(ZeroDivisionError), module_scopes():
        1 / 0  # noqa: B018
    assert vars(Block)["__call__"] is call


def test_other_threads_are_left_alone(net):
    """A thread that traces while another one has scopes open gets none."""
    names = []

    def other():
        names.append(first_scope())

    def first_scope():
        traced = jax.make_jaxpr(lambda x: net(x))(X)
        return str(traced.eqns[0].source_info.name_stack)

    with module_scopes():
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
        names.append(first_scope())
    assert names == ["", "Net/layers/0/up"]


def test_substituted_modules_keep_their_names(net):
    lean = jaxmem.substitute(net, activations="output")
    found = {
        of_user(e.path): ops_in(e.path)
        for e in residuals(lambda x: jnp.sum(lean(x) ** 2), X)
        if e.kind == "intermediate"
    }
    assert not any("jaxmem" in path for path in found)
    assert found["Net/layers/1"] == "jaxmem.gelu"


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("jit(f)/jvp(Bert)/mlp/up/jaxmem.dense/dot_general", "Bert/mlp/up"),
        (
            "jit(f)/transpose(jvp(Bert))/mlp/jvp(Bert)/mlp/jaxmem.gelu/checkpoint/mul",
            "Bert/mlp",
        ),
        ("jit(f)/jvp(Bert)/up/add_any;jit(<lambda>)/mlp/tanh", "Bert/up"),
        ("jit(f)/jaxmem.adam/mul", ""),
    ],
)
def test_paths_without_the_scopes_of_ops(op_name, path):
    assert of_user(parse_op_name(op_name).module_path) == path
