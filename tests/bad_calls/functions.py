"""Substitution, rewriting, and planning of plain graphs."""

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen

import jaxmem
from jaxmem import planning, rewriting, scheduling
from jaxmem.planning import Buffer, Graph, Operation, Value
from tests.arrays import ones
from tests.bad_calls.call import (
    COUNT,
    DTYPE,
    FLAG,
    FUNCTION,
    FUNCTION_OR_NONE,
    INF,
    NOT_INT,
    NOT_NEGATIVE,
    NOT_NEGATIVE_INT,
    NOT_NUMBER,
    POSITIVE,
    WORD,
    Call,
)

BUFFERS = (Buffer(0, 0, 2, 8), Buffer(1, 1, 3, 8))
GRAPH = Graph(
    (Operation("a", (0,), (1,), flops=1.0), Operation("b", (1,), (2,), flops=1.0)),
    (Value(8), Value(8), Value(8)),
    arguments=(0,),
    outputs=(2,),
)
NO_GRAPH = (None, "x", BUFFERS)
NO_BUFFERS = (None, 3, "x", ["x"], [(0, 1, 8)], (BUFFERS[0], BUFFERS[0]))
ORDER = ("01", 3, (0,), (1, 0), (0, 0), (0.5, 1), (True, 1), (0, 1, 2), {})
OFFSETS = {0: 0, 1: 8}
CLOSED = jax.make_jaxpr(lambda x: jnp.tanh(x) * 2)(ones(3))
OPERATIONS = scheduling.operations_of(CLOSED)
THEIRS = tuple(range(len(OPERATIONS.graph.operations)))
PATH = "buffers.csv"
LINEAR = {"norm": {"scale": ones(2)}, "dense": {"kernel": ones((2, 3))}}
SAVE = ("banana", "", 0, 9, 1.5, True, ["output"])

ORDERS = [
    Call(fn.__name__, fn, {"graph": GRAPH}, {"graph": NO_GRAPH})
    for fn in (
        *(planning.best_greedy, planning.depth_first_order, planning.list_order),
        *(planning.least_peak_first_order, planning.post_order),
        *(planning.program_order, planning.xla_order),
    )
]
LIMIT = (*NOT_NUMBER, -1.0)
REMAT = {"cost": FUNCTION_OR_NONE, "effort": NOT_NEGATIVE, "time_limit": LIMIT}
PROGRESS = {"progress": FUNCTION_OR_NONE}

CALLS = [
    Call("substitute", jaxmem.substitute, {"model": linen.Dense(2)}, {
        "model": (None, 3, "Dense", linen.Dense, {}),
        "rules": (3, "norm", [3], linen.Dense),
        "save": (None, *SAVE, {3: 8}, {"*": "banana"}), "activations": SAVE,
        "patterns": (3, "gelu", [3]), "verbose": FLAG,
    }),
    Call("report", jaxmem.nn.report, {"model": jaxmem.substitute(linen.Dense(2))}, {
        "model": (None, 3, linen.Dense(2)),
    }),
    Call("Rule", jaxmem.nn.Rule, {"match": linen.Dense, "replace": None}, {
        "match": (None, 3, (3,), "(", (), ""), "replace": (3, "x"),
    }),
    Call("reversible", jaxmem.reversible, {"f": jnp.dot, "g": jnp.dot}, {
        "f": FUNCTION, "g": FUNCTION, "stream_dtype": DTYPE,
    }),
    Call("merge_norm", jaxmem.nn.merge_norm,
        {"model": LINEAR, "norm": "norm", "into": "dense"}, {
            "model": (None, 3, "x"), "norm": (None, 3, "", "nrom"),
            "into": (None, 3, "", "danse", [3], ()),
        }, trace=True),
    Call("unmerge_norm", jaxmem.nn.unmerge_norm,
        {"model": LINEAR, "norm": "norm", "into": "dense", "scale": np.ones(2)}, {
            "model": (None, 3, "x"), "norm": (None, 3, "", "nrom"),
            "into": (None, 3, "", "danse", [3], ()),
            "scale": ("x", ones(3), {}), "bias": ("x", ones(3), ones(2)),
        }, unchecked=True),
    Call("rewrite", rewriting.rewrite, {"fn": jnp.tanh}, {
        "fn": FUNCTION, "patterns": (None, 3, "gelu", [3]),
        "on_report": FUNCTION_OR_NONE,
    }),
    Call("find", lambda fn, **kw: rewriting.find(fn, ones(3), **kw),
        {"fn": jnp.tanh}, {"fn": FUNCTION, "patterns": (None, 3, "gelu", [3])}),
    Call("auto_save", rewriting.auto_save, {"fn": jnp.tanh}, {
        "fn": FUNCTION, "on_choice": FUNCTION_OR_NONE,
    }),
    Call("share_codes", rewriting.share_codes, {"fn": jnp.tanh}, {"fn": FUNCTION}),
    Call("library", rewriting.library, {}, {
        "save": (None, *SAVE), "norm_save": (None, "banana", "", 8, True, "auto"),
    }),
    Call("Pattern", rewriting.Pattern,
        {"name": "a", "plain": jnp.tanh, "lean": jnp.tanh}, {
            "name": (None, 3, ""), "plain": FUNCTION, "lean": FUNCTION,
            "examples": ("*batch", (3,), (), None), "scalars": ("alpha", (3,)),
            "when": (None, 3), "uncast": (3, ("0",)), "params": ("x", (3,)),
        }),
    Call("Buffer", Buffer, {"id": 0, "lower": 0, "upper": 2, "size": 8}, {
        "id": (None, 1.5, [0]), "lower": (None, *NOT_INT, 2),
        "upper": (None, *NOT_INT, 0), "size": (None, *NOT_NEGATIVE_INT),
        "alignment": (None, *COUNT), "gaps": (3, "x", [3], (planning.Gap(1, 3),)),
    }),
    Call("Gap", planning.Gap, {"lower": 0, "upper": 2}, {
        "lower": (None, *NOT_INT, 2), "upper": (None, *NOT_INT, 0),
        "window": (3, "x", (1,), (4, 4), (-1, 4)),
    }),
    Call("Graph", Graph,
        {"operations": GRAPH.operations, "values": GRAPH.values, "arguments": (0,)}, {
            "operations": (None, 3, "ab", (3,)),
            "values": (None, 3, (8, 8, 8), (Value(8),) * 2),
            "arguments": (3, ("x",), (0.0,)), "outputs": (3, ("x",), (7,)),
            "aliases": (3, "x", {2: 0}, {"x": 0}),
        }),
    Call("Value", Value, {"bytes": 8}, {
        "bytes": (None, *NOT_NEGATIVE_INT),
    }),
    *ORDERS,
    Call("peak", planning.peak, {"graph": GRAPH}, {"graph": NO_GRAPH, "order": ORDER}),
    Call("profile", planning.profile, {"graph": GRAPH}, {
        "graph": NO_GRAPH, "order": ORDER,
    }),
    Call("lifetimes", planning.lifetimes, {"graph": GRAPH}, {
        "graph": NO_GRAPH, "order": ORDER, "alignment": (None, *COUNT),
    }),
    Call("order", planning.order, {"graph": GRAPH}, {
        "graph": NO_GRAPH, "time_limit": (None, *LIMIT, 0), **PROGRESS,
    }),
    Call("lower_bound", planning.lower_bound, {"graph": GRAPH}, {
        "graph": NO_GRAPH, "cuts": (None, *NOT_NEGATIVE_INT),
    }),
    Call("best_fit", planning.best_fit, {"buffers": BUFFERS}, {
        "buffers": NO_BUFFERS, "by": (None, *WORD), "alignment": (None, *COUNT),
    }),
    Call("layout", planning.layout, {"buffers": BUFFERS}, {
        "buffers": NO_BUFFERS, "capacity": (*NOT_INT, -1, 3, INF),
        "time_limit": (None, *LIMIT), "long_lived": (3, "0", [7], [[0]]),
        "seed": (None, *NOT_NEGATIVE_INT), "alignment": (None, *COUNT), **PROGRESS,
    }),
    Call("rematerialise", planning.rematerialise, {"graph": GRAPH, "budget": 100}, {
        "graph": NO_GRAPH, "budget": (None, *NOT_NUMBER, -1), "exact": FLAG,
        "order": (None, *ORDER), **REMAT, **PROGRESS,
    }),
    Call("frontier", planning.frontier, {"graph": GRAPH}, {
        "graph": NO_GRAPH, "order": (None, *ORDER), **REMAT, **PROGRESS,
    }),
    Call("sequence_profile", planning.sequence_profile,
        {"graph": GRAPH, "sequence": (0, 1)}, {
            "graph": NO_GRAPH,
            "sequence": (None, 3, "01", (0,), (1, 0), (0, 7), (0, 0.5), (0, True)),
        }),
    Call("seconds", planning.seconds, {}, {
        "peak_flops": (None, *POSITIVE), "bandwidth": (None, *POSITIVE),
    }),
    Call("read_buffers", planning.read_buffers, {"path": PATH}, {
        "path": (None, 3, [], True, ""),
    }, unchecked=True),
    Call("write_buffers", planning.write_buffers, {"path": PATH, "buffers": BUFFERS}, {
        "path": (None, 3, [], True, ""), "buffers": NO_BUFFERS,
        "offsets": (3, "x", {0: 0}, {0: 0, 1: 1.5}),
    }, unchecked=True),
    Call("Layout.check", lambda **kw: planning.Layout(BUFFERS, **kw).check(),
        {"offsets": OFFSETS, "lower_bound": 8}, {"offsets": ({0: 0}, {0: 0, 1: 0.5})}),
    Call("operations_of", scheduling.operations_of, {"closed": CLOSED}, {
        "closed": (None, 3, jnp.tanh), "aliases": (3, {7: 0}, {0: 7}),
        "peak_of": FUNCTION, "tpu": FLAG,
    }),
    Call("fences_of", scheduling.fences_of, {"graph": GRAPH, "order": (0, 1)}, {
        "graph": NO_GRAPH, "order": (None, *ORDER), "least": (None, *NOT_NEGATIVE_INT),
    }),
    Call("in_given_order", scheduling.in_given_order,
        {"ops": OPERATIONS, "order": THEIRS}, {
            "ops": (None, 3, CLOSED), "order": (None, "0", (), (7,)),
            "fences": ("x", ("x",), (1.5,)), "least": (None, *NOT_NEGATIVE_INT),
        }),
]  # fmt: skip
