"""`jaxmem.ops`."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxmem import ops
from tests.arrays import ones
from tests.bad_calls.call import (
    COUNT,
    DTYPE,
    FLAG,
    FUNCTION,
    INF,
    NOT_ARRAY,
    NOT_INT,
    NOT_NEGATIVE,
    POSITIVE,
    SHARE,
    WORD,
    Call,
)

X = ones((2, 4))
ROW = ones(4)
KERNEL = ones((4, 6))
INTS = ones((2, 4), jnp.int32)
COMPLEX = ones((2, 4), jnp.complex64)
IMAGE = ones((1, 6, 6, 3))
QUERY = ones((1, 5, 2, 4))
KEY = jax.random.key(0)

FLOATS = (*NOT_ARRAY, INTS)
PARAMETER = ("x", ones(3), {}, 1.0)
RNG = (3, "key", ones(2), jax.random.split(KEY))
IMPLEMENTATION = ("banana", "", 3, True, ["xla"])
AXIS = ("x", 1.5, True, 2, -3, (), (0, 0), [0.5])
BITS = (0, 9, 1.5, True, "x")  # where None or a Quantization may stand
WORDS_OR_BITS = (None, 0, 9, 1.5, True, "banana", "", ["input"])
MASK = ("x", ones((3, 3), bool), {}, ones((2, 4)))
SHARED = {"epsilon": (None, *NOT_NEGATIVE), "dtype": DTYPE}
ACROSS = {"axis_name": (3, (), ("",), ["x", 1]), "axis_index_groups": (3, "x", [3])}

ACTIVATIONS = [
    Call(fn.__name__, fn, {"x": X}, {
        "x": (*NOT_ARRAY, COMPLEX, [1.0]), "save": WORDS_OR_BITS,
        "bits": (4, 0, 9, "x", True),
    }, trace=True)
    for fn in (
        *(ops.elu, ops.gelu, ops.leaky_relu, ops.mish, ops.relu, ops.sigmoid),
        *(ops.silu, ops.softplus, ops.squared_relu, ops.tanh),
    )
]  # fmt: skip
NORM = {"x": FLOATS, "scale": PARAMETER, "mask": MASK, **SHARED}
LAYER = {
    **NORM, **ACROSS, "axis": (None, *AXIS), "feature_axis": AXIS,
    "save": WORDS_OR_BITS,
    "save_rng": (3, "key", ones(2)), "implementation": IMPLEMENTATION,
}  # fmt: skip
BATCH = {
    **NORM, **ACROSS, "bias": PARAMETER, "axis": (None, *AXIS),
    "use_fast_variance": FLAG, "mean": (ROW,), "var": (ROW,),
}  # fmt: skip
DROPOUT_ADD = {
    "x": FLOATS, "residual": (*FLOATS, ones((2, 3))), "scale": PARAMETER, **SHARED,
    "rate": (None, *SHARE), "rng": RNG, "deterministic": FLAG,
    "save": (None, "banana", "", 0, True), "implementation": IMPLEMENTATION,
}  # fmt: skip
MERGE = {
    "kernel": NOT_ARRAY, "bias": ("x", {}, ones(5)),
    "scale": ("x", {}, ones(3), ones((4, 1))),
    "shift": ("x", {}, ones(3), ones((4, 1))),
}  # fmt: skip
PRODUCT = {
    "x": (*NOT_ARRAY, ones((2, 3)), ones(())),
    "kernel": (*NOT_ARRAY, ones((3, 6)), ones(())),
    "bias": (*PARAMETER, ones((6, 1))), "dtype": DTYPE,
    "precision": ("banana", 3, [1]),
}  # fmt: skip
SIZES = (None, "x", 0, 1.5, True, (1,), (1, 2, 3), (1, 0), (1, 1.5))

CALLS = [
    *ACTIVATIONS,
    Call("gelu+", ops.gelu, {"x": X}, {
        "approximate": (None, 3, "tanh"), "implementation": IMPLEMENTATION,
    }, trace=True),
    Call("silu+", ops.silu, {"x": X}, {"implementation": IMPLEMENTATION}, trace=True),
    Call("elu+", ops.elu, {"x": X}, {
        "alpha": (None, "x", True, ones(3), float("nan"), INF),
    }, trace=True),
    Call("leaky_relu+", ops.leaky_relu, {"x": X}, {
        "negative_slope": (None, "x", True, ones(3), float("nan"), INF),
    }, trace=True),
    Call("regelu2", ops.regelu2, {"x": X}, {"x": NOT_ARRAY}, trace=True),
    Call("resilu2", ops.resilu2, {"x": X}, {"x": NOT_ARRAY}, trace=True),
    Call("glu", ops.glu, {"x": X}, {
        "x": NOT_ARRAY, "axis": (None, "x", 1.5, True, 2, -3, [0]),
    }, trace=True),
    Call("swiglu", ops.swiglu, {"gate": X, "up": X}, {
        "gate": (*NOT_ARRAY, ones(3)), "up": (*NOT_ARRAY, ones(3)),
    }, trace=True),
    Call("geglu", ops.geglu, {"gate": X, "up": X}, {
        "gate": (*NOT_ARRAY, ones(3)), "up": (*NOT_ARRAY, ones(3)),
        "approximate": (None, 3, "tanh"),
    }, trace=True),
    Call("layer_norm", ops.layer_norm, {"x": X}, {
        **LAYER, "bias": PARAMETER, "use_fast_variance": FLAG,
    }, trace=True),
    Call("rms_norm", ops.rms_norm, {"x": X}, LAYER, trace=True),
    Call("ms_layer_norm", ops.ms_layer_norm, {"x": X}, {
        **NORM, "bias": PARAMETER, "use_fast_variance": FLAG,
        "save": (*WORDS_OR_BITS, "input"), "save_rng": (3, "key"),
    }, trace=True),
    Call("ms_rms_norm", ops.ms_rms_norm, {"x": X}, {
        **NORM, "save": (*WORDS_OR_BITS, "input"), "save_rng": (3, "key"),
    }, trace=True),
    Call("group_norm", ops.group_norm, {"x": X, "num_groups": 2}, {
        **NORM, **ACROSS, "bias": PARAMETER, "num_groups": (None, *COUNT, 3),
        "reduction_axes": (*AXIS, 0), "use_fast_variance": FLAG,
    }, trace=True),
    Call("batch_norm", ops.batch_norm, {"x": X}, BATCH, trace=True),
    Call("inplace_abn", ops.inplace_abn, {"x": X}, {
        **BATCH, "activation": (None, *WORD, "relu"),
        "negative_slope": (None, *POSITIVE),
    }, trace=True),
    Call("inplace_abn elu", ops.inplace_abn, {"x": X, "activation": "elu"}, {
        "alpha": (None, *POSITIVE),
    }, trace=True),
    Call("inplace_abn gelu", ops.inplace_abn, {"x": X, "activation": "gelu"}, {
        "approximate": (None, 3, "tanh"),
    }, trace=True),
    Call("dropout", ops.dropout, {"x": X, "rate": 0.5, "rng": KEY}, {
        "x": FLOATS, "rate": (None, *SHARE), "rng": (None, *RNG),
        "broadcast_dims": ("x", (2,), (0.5,), 1.5), "deterministic": FLAG,
    }, trace=True),
    Call("dropout_add_layer_norm", ops.dropout_add_layer_norm,
        {"x": X, "residual": X, "rate": 0.5, "rng": KEY},
        {**DROPOUT_ADD, "bias": PARAMETER}, trace=True),
    Call("dropout_add_rms_norm", ops.dropout_add_rms_norm,
        {"x": X, "residual": X, "rate": 0.5, "rng": KEY}, DROPOUT_ADD, trace=True),
    Call("softmax", ops.softmax, {"x": X}, {
        "x": FLOATS, "axis": AXIS, "where": MASK, "save": BITS, "save_rng": (3, "key"),
    }, trace=True),
    Call("log_softmax", ops.log_softmax, {"x": X}, {
        "x": FLOATS, "axis": AXIS, "where": MASK,
    }, trace=True),
    Call("where", ops.where, {"condition": X > 0, "x": X, "y": X}, {
        "condition": (*NOT_ARRAY, X), "x": (*FLOATS, ones((3, 3))),
        "y": (*FLOATS, ones((3, 3))),
    }, trace=True),
    Call("max_pool", ops.max_pool, {"inputs": IMAGE, "window_shape": (2, 2)}, {
        "inputs": (*NOT_ARRAY, ones((1, 6, 6, 3), jnp.int32), ROW),
        "window_shape": (None, "x", 2, (), (0, 2), (1.5, 2), (99, 99), (2,) * 5),
        "strides": ("x", 2, (2,), (0, 2), (1.5, 2)),
        "padding": (None, "banana", 3, ((0, 0),), ((-1, 0),) * 2, ((0, 0.5),) * 2),
    }, trace=True),
    Call("dense", ops.dense, {"x": X, "kernel": KERNEL}, {
        **PRODUCT, "axis": (None, *AXIS), "preferred_element_type": ("banana", 3.5),
        "save": BITS, "save_rng": (3, "key"),
    }, trace=True),
    Call("conv", ops.conv, {"x": IMAGE, "kernel": ones((2, 2, 3, 5))}, {
        "x": (*NOT_ARRAY, ROW, ones((1, 6, 6, 2))),
        "kernel": (*NOT_ARRAY, ROW, ones((2, 2, 2, 5))),
        "bias": PARAMETER, "strides": SIZES, "input_dilation": SIZES,
        "kernel_dilation": SIZES,
        "padding": (None, "banana", 1.5, True, (1,), ((1,),) * 2),
        "feature_group_count": (None, *COUNT, 2),
        "batch_group_count": (None, *COUNT, 2),
        "dimension_numbers": (3, "x", ("NHWC", "HWIO")), "dtype": DTYPE,
        "precision": ("banana", 3), "save": BITS,
    }, trace=True),
    Call("sampled_dense", ops.sampled_dense, {"x": X, "kernel": KERNEL, "key": KEY}, {
        **PRODUCT, "key": (None, *RNG), "budget": (None, *SHARE, 0, 0.0),
        "method": (None, *WORD), "row_norms": ("x", {}, ones(3)),
        "norm_cache": ("x", {}, ones(3), INTS), "sample_ids": ("x", {}, X, ones(3)),
    }, trace=True),
    Call("velora_dense", ops.velora_dense,
        {"x": X, "kernel": KERNEL, "projection": ones(2)}, {
            **PRODUCT, "scale": (None, "x", True, float("nan"), INF, [1.0]),
            "projection": (*NOT_ARRAY, ones(3), ones((2, 2))),
        }, trace=True),
    Call("velora_projection", ops.velora_projection, {"x": X, "groups": 2}, {
        "x": (*NOT_ARRAY, ones(())), "groups": (None, *COUNT, 3),
        "method": (None, *WORD),
    }, trace=True),
    Call("embed", ops.embed, {"table": X, "ids": jnp.array([1])}, {
        "table": (*FLOATS, jnp.float32(1.0)),
        "ids": (*NOT_ARRAY, X, 1.5, True, jnp.array([2]), -3),
        "out_of_range": ("banana", 3, True, ["clip"]),
    }),
    Call("embedding_bag", ops.embedding_bag, {"table": X, "ids": jnp.array([1])}, {
        "table": (*FLOATS, jnp.float32(1.0)),
        "ids": (*NOT_ARRAY, X, 1, jnp.array([2]), jnp.zeros((2, 0), jnp.int32)),
        "weights": ("x", {}, INTS, ones(2)), "mode": (None, *WORD),
        "out_of_range": ("banana", 3, True, ["clip"]),
    }),
    Call("product_key_memory", ops.product_key_memory,
        {"queries": jnp.ones((3, 2, 4)), "keys": jnp.ones((2, 2, 5, 2)),
        "values": jnp.ones((25, 3)), "k": 2}, {
        "queries": (*FLOATS, jnp.ones((3, 2, 5))),
        "keys": (*FLOATS, jnp.ones((2, 5, 2))),
        "values": (*FLOATS, jnp.ones((24, 3))), "k": (None, *COUNT, 6),
    }),
    Call("merge_scale", ops.merge_scale,
        {"kernel": KERNEL, "bias": ones(6)}, MERGE, trace=True),
    Call("unmerge_scale", ops.unmerge_scale,
        {"kernel": KERNEL, "bias": ones(6)},
        {**MERGE, "scale": (*MERGE["scale"], np.zeros(4, np.float32))}, trace=True),
    Call("stored", ops.stored, {"x": X}, {
        "x": FLOATS, "save": (None, *BITS, [8]), "rng": (3, "key", ones(2)),
    }, trace=True),
    Call("stored_in_ranges", ops.stored_in_ranges,
        {"x": X, "ranges": np.zeros((2, 1), np.float32)}, {
            "x": FLOATS, "ranges": (*FLOATS, ones(2), ones((2, 0)), ones((3, 1))),
            "bits": (None, *BITS), "decay": (None, "x", True, -1.0, 1, np.nan),
            "rng": (3, "key", ones(2)),
    }, trace=True),
    Call("Quantization", ops.Quantization, {}, {
        "bits": (None, *COUNT, 9), "block_size": (None, *COUNT), "symmetric": FLAG,
    }),
    Call("save_quantized", ops.save_quantized, {"fn": jnp.tanh}, {
        "fn": FUNCTION, "bits": (None, *COUNT, 9), "block_size": (None, *COUNT),
        "argnums": (None, "0", 1.5, True, (), [0.5]), "symmetric": FLAG,
        "rng": (3, "key", ones(2)),
    }),
    Call("elementwise", ops.elementwise, {"fn": jnp.tanh}, {
        "fn": FUNCTION, "save": BITS, "rng": (3, "key", ones(2)),
    }),
    Call("fewbit", ops.fewbit, {"fn": jnp.tanh, "bits": 1}, {
        "fn": FUNCTION, "bits": (None, *COUNT, 9),
        "table": (3, "x", ((1.0,), (1.0,)), ((1.0, 0.0), (1.0, 2.0, 3.0))),
        "objective": (None, *WORD), "interval": (None, 3, "x", (1.0,), (1.0, -1.0),
            (0.0, INF), ("a", "b")),
        "weight": (None, "banana", "", (1.0,), np.ones(0), {}, ["x"]),
        "breaks": (3, "x", (1.0, 0.0), (11.0,), ("a",), (INF,)),
    }),
    Call("fewbit_table", ops.fewbit_table, {"fn": jnp.tanh, "bits": 1}, {
        "fn": FUNCTION, "bits": (None, *COUNT, 9), "objective": (None, *WORD),
        "interval": (None, 3, "x", (1.0,), (1.0, -1.0), (0.0, INF)),
        "weight": (None, "banana", "", (1.0,), np.ones(0), {}, ["x"]),
        "breaks": (3, "x", (1.0, 0.0), (11.0,), ("a",), (INF,)),
    }),
    Call("dot_product_attention", ops.dot_product_attention,
        {"query": QUERY, "key": QUERY, "value": QUERY}, {
            "query": (*NOT_ARRAY, ROW, QUERY.astype(int), ones((1, 5, 2, 3))),
            "key": (*NOT_ARRAY, ROW, ones((1, 5, 2, 3)), ones((1, 0, 2, 4))),
            "value": (*NOT_ARRAY, ROW, ones((1, 5, 2, 3))),
            "bias": ("x", {}, ones((3, 3)), ones((1,) * 5)),
            "mask": ("x", {}, ones((3, 3), bool), ones((5, 5))),
            "scale": ("x", True, float("nan"), INF, [1.0]), "is_causal": FLAG,
            "query_seq_lengths": ("x", ones(1), ones(3, jnp.int32)),
            "key_value_seq_lengths": ("x", ones(1), ones(3, jnp.int32)),
            "query_segment_ids": ("x", ones((1, 5)), ones((1, 4), jnp.int32)),
            "local_window_size": ("x", 1.5, True, -1, (1,), (1, -1), (1, 1.5)),
            "dropout_rate": (None, *SHARE, 0.5), "dropout_rng": (3, "key"),
            "broadcast_dropout": FLAG, "deterministic": FLAG,
            "implementation": IMPLEMENTATION, "block_size": COUNT, "save": BITS,
        }, trace=True),
    Call("linear_cross_entropy", ops.linear_cross_entropy,
        {"x": X, "kernel": KERNEL, "labels": jnp.zeros(2, jnp.int32)}, {
            "x": (*FLOATS, ones((2, 3)), ones(())),
            "kernel": (*NOT_ARRAY, ones((3, 6)), ones(4), ones((4, 0))),
            "labels": (*NOT_ARRAY, jnp.zeros(2), jnp.zeros(3, jnp.int32)),
            "bias": PARAMETER, "vocab_axis": (None, *NOT_INT, 2),
            "ignore_index": NOT_INT, "where": ("x", ones(2), ones(3, bool)),
            "weights": ("x", ones(3)), "label_smoothing": (None, *SHARE),
            "z_loss": (None, *NOT_NEGATIVE), "softcap": POSITIVE,
            "reduction": (None, *WORD), "return_lse": FLAG,
            "axis_name": (3, (), "", ["x", 1]), "dtype": DTYPE,
            "accumulator_dtype": DTYPE, "precision": ("banana", 3),
            "block_size": COUNT, "implementation": IMPLEMENTATION,
        }, trace=True),
]  # fmt: skip
