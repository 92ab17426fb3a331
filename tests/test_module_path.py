"""From XLA's op_name to module path, operation and pass."""

import pytest

from jaxmem._module_path import merge_numbered, parse_op_name

CASES = [
    (
        "jit(f)/jvp(Bert)/layers/while/body/closed_call/attention/query/dot_general",
        ("Bert/layers/attention/query", "dot_general", False),
    ),
    (
        "jit(f)/transpose(jvp(Bert))/layers/while/body/eval_jaxpr/mlp/mul",
        ("Bert/layers/mlp", "mul", True),
    ),
    ("jit(f)/jvp()/while/body/closed_call/exp", ("", "exp", False)),
    ("jit(f)/jvp(A)/jit(silu)/logistic", ("A", "silu/logistic", False)),
    ("jit(f)/jvp(A)/jit(_where)/select_n", ("A", "where/select_n", False)),
    (
        "jit(f)/A/attention/bqhd,bkhd->bhqk/dot_general",
        ("A/attention", "bqhd,bkhd->bhqk/dot_general", False),
    ),
    ("jit(f)/A/cond/branch_1_fun/dot_general", ("A", "dot_general", False)),
    ("jit(f)/vmap(A)/body/sin", ("A/body", "sin", False)),
    (
        "jit(f)/transpose(jvp(A))/checkpoint/rematted_computation/B/tanh",
        ("A/B", "tanh", True),
    ),
    # The backward pass of an op of this package repeats the path that the op is in.
    (
        "jit(f)/transpose(jvp(A))/while/body/closed_call/layers/Dense_0/jaxmem.dense/"
        "layers/Dense_0/jaxmem.dense/checkpoint/dot_general",
        ("A/layers/Dense_0/jaxmem.dense", "dot_general", True),
    ),
    (
        "jit(f)/transpose(jvp(A))/while/body/closed_call/layers/layers/jaxmem.gelu/"
        "checkpoint/rematted_computation/jaxmem.gelu/jit(clip)/max",
        ("A/layers/jaxmem.gelu", "clip/max", True),
    ),
    (
        "jit(f)/transpose(jvp())/blk/jvp()/blk/jaxmem.gelu/checkpoint/mul",
        ("blk/jaxmem.gelu", "mul", True),
    ),
    # A module in another of the same name is the user's.
    ("jit(f)/transpose(jvp(A))/Block/Block/mul", ("A/Block/Block", "mul", True)),
    (
        "jit(f)/jvp(A)/while/body/closed_call/Block/Block/jaxmem.gelu/mul",
        ("A/Block/Block/jaxmem.gelu", "mul", False),
    ),
    (
        "jit(f)/transpose(jvp(A))/while/body/closed_call/Block/Block/Block/Block/"
        "jaxmem.gelu/checkpoint/jaxmem.gelu/mul",
        ("A/Block/Block/jaxmem.gelu", "mul", True),
    ),
    (
        "jit(f)/transpose(jvp(A))/Block/Block/jvp(A)/Block/Block/jaxmem.gelu/"
        "checkpoint/jaxmem.gelu/mul",
        ("A/Block/Block/jaxmem.gelu", "mul", True),
    ),
    (
        "jit(f)/transpose(jvp(A))/jvp(A)/checkpoint/Block/Block/jaxmem.gelu/"
        "checkpoint/rematted_computation/jaxmem.gelu/mul",
        ("A/Block/Block/jaxmem.gelu", "mul", True),
    ),
    (
        "jit(f)/transpose(jvp(A))/while/body/closed_call/checkpoint/Block/Block/"
        "jaxmem.dense/checkpoint/dot_general",
        ("A/Block/Block/jaxmem.dense", "dot_general", True),
    ),
    ("jit(call_exported)/call_exported/A/add", ("A", "add", False)),
    ("params['w']", ("", "params['w']", False)),
    ("", ("", "", False)),
]


@pytest.mark.parametrize("op_name, expected", CASES)
def test_parse(op_name, expected):
    found = parse_op_name(op_name)
    assert (found.module_path, found.operation, found.backward) == expected


def test_recomputed():
    assert parse_op_name("jit(f)/checkpoint/rematted_computation/sin").recomputed
    assert not parse_op_name("jit(f)/sin").recomputed


def test_many_numbered_siblings_are_one():
    paths = [f"Bert/layers_{i}/mlp/Dense_{j}" for i in range(4) for j in range(2)]
    merged = merge_numbered(paths)
    assert set(merged.values()) == {
        "Bert/layers_*/mlp/Dense_0",
        "Bert/layers_*/mlp/Dense_1",
    }


def test_few_numbered_siblings_stay():
    paths = ["A/Dense_0", "A/Dense_1", "A/ln2"]
    assert list(merge_numbered(paths).values()) == paths


def test_numbers_alone_are_siblings_too():
    assert merge_numbered([f"layers/{i}/mlp" for i in range(6)])["layers/5/mlp"] == (
        "layers/*/mlp"
    )
