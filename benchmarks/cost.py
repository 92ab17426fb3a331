"""Matmul flops and bytes accessed, forward and backward, of each op and its reference.

    python -m benchmarks.cost

Flops: the `dot_general`s of the jaxpr of `jax.vjp`, times the lengths of the scans
round them. Bytes: TPU v5e's own cost analysis of the compiled program, which counts the
body of a loop once (attention in blocks, the layers of BERT), and a prefetch into
on-chip memory as accesses (dropout alone). `save="output"` is meant for a value that
the next matmul keeps; alone, it must write and read what it keeps.
"""

import math
from functools import partial

import flax.linen as nn
import jax
import jax.numpy as jnp

import jaxmem
from benchmarks._common import MIB, publish
from benchmarks.layers import flax_attention, lean_attention
from benchmarks.models.transformers import (
    Bert,
    BertConfig,
    abstract_params,
    masked_loss,
)
from jaxmem import ops
from jaxmem.ir.jaxprs import bodies, split

SDS = jax.ShapeDtypeStruct
BF16 = jnp.bfloat16


def matmul_flops(jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(matmul_flops, (split(b)[0] for b in bodies(eqn))))
        if eqn.primitive.name == "dot_general":
            (contract, _), _ = eqn.params["dimension_numbers"]
            depth = math.prod(eqn.invars[0].aval.shape[i] for i in contract)
            total += 2 * depth * math.prod(eqn.outvars[0].aval.shape)
    return total


def forward_and_backward(fn, diff):
    """(args, cotangent) -> output and gradients, and the cotangent's shape."""

    def run(args, cotangent):
        def partial_fn(*some):
            full = list(args)
            for i, x in zip(diff, some, strict=True):
                full[i] = x
            return fn(*full)

        out, pull = jax.vjp(partial_fn, *(args[i] for i in diff))
        return out, pull(cotangent)

    return run


def cases():
    """(op, lean, reference, arguments, differentiated positions)."""
    x = SDS((4096, 4096), BF16)
    affine = SDS((4096,), jnp.float32)
    for save in ("input", "output"):
        gelu = partial(ops.gelu, save=save)
        erf = partial(ops.gelu, approximate=False, save=save)
        stock_erf = partial(jax.nn.gelu, approximate=False)
        yield f"gelu tanh, save={save}", gelu, jax.nn.gelu, (x,), (0,)
        yield f"gelu erf, save={save}", erf, stock_erf, (x,), (0,)
        silu = partial(ops.silu, save=save)
        yield f"silu, save={save}", silu, jax.nn.silu, (x,), (0,)
        norm = partial(ops.layer_norm, save=save)
        args = (x, affine, affine)
        yield f"layer_norm, save={save}", norm, _flax_layer_norm, args, (0, 1, 2)
        norm = partial(ops.rms_norm, save=save)
        yield f"rms_norm, save={save}", norm, _flax_rms_norm, args[:2], (0, 1)
    for name in ("relu", "softplus", "elu", "leaky_relu", "mish", "tanh", "sigmoid"):
        yield name, getattr(ops, name), getattr(jax.nn, name), (x,), (0,)
    yield "softmax", ops.softmax, jax.nn.softmax, (x,), (0,)
    yield "log_softmax", ops.log_softmax, jax.nn.log_softmax, (x,), (0,)
    yield "swiglu", ops.swiglu, lambda g, u: jax.nn.silu(g) * u, (x, x), (0, 1)
    yield "geglu", ops.geglu, lambda g, u: jax.nn.gelu(g) * u, (x, x), (0, 1)
    drop = lambda x, k: ops.dropout(x, 0.1, jax.random.wrap_key_data(k))
    key = SDS((2,), jnp.uint32)
    yield "dropout", drop, _flax_dropout, (x, key), (0,)
    kernel = SDS((4096, 4096), jnp.float32)
    args = (x, kernel, affine)
    dense = partial(ops.dense, dtype=BF16)
    yield "dense, f32 kernel", dense, _flax_dense, args, (0, 1, 2)
    yield from _attention_cases()


def _attention_cases():
    key = SDS((2,), jnp.uint32)
    for batch, length in ((8, 512), (1, 4096)):
        q = SDS((batch, length, 16, 64), BF16)
        shape = f"B {batch} S {length}"
        args, wanted = (q, q, q), (0, 1, 2)
        lean, stock = ops.dot_product_attention, jax.nn.dot_product_attention
        yield f"attention {shape}", lean, stock, args, wanted
        lean, stock = _keyed(lean_attention), _keyed(flax_attention)
        yield f"attention dropout 0.1 {shape}", lean, stock, (*args, key), wanted


def _keyed(attend):
    return lambda q, k, v, key: attend(q, k, v, jax.random.wrap_key_data(key))


def _flax_layer_norm(x, scale, bias):
    params = {"scale": scale, "bias": bias}
    return nn.LayerNorm(dtype=x.dtype).apply({"params": params}, x)


def _flax_rms_norm(x, scale):
    return nn.RMSNorm(dtype=x.dtype).apply({"params": {"scale": scale}}, x)


def _flax_dropout(x, key):
    rngs = {"dropout": jax.random.wrap_key_data(key)}
    return nn.Dropout(0.1, deterministic=False).apply({}, x, rngs=rngs)


def _flax_dense(x, kernel, bias):
    module = nn.Dense(kernel.shape[1], dtype=x.dtype)
    return module.apply({"params": {"kernel": kernel, "bias": bias}}, x)


def cost(fn, args, diff) -> tuple[int, float]:
    """(matmul flops, bytes accessed on TPU v5e) of forward and backward together."""
    run = forward_and_backward(fn, diff)
    cotangent = jax.eval_shape(fn, *args)
    flops = matmul_flops(jax.make_jaxpr(run)(args, cotangent).jaxpr)
    report = jaxmem.estimate(run, args, cotangent, target="tpu-v5e")
    return flops, report.cost["bytes accessed"]


def bert_step(model):
    loss = masked_loss(model)
    step = lambda params, tokens, key: jax.value_and_grad(loss)(
        params, tokens, jax.random.wrap_key_data(key)
    )
    tokens = SDS((8, 512), jnp.int32)
    args = (abstract_params(model, tokens), tokens, SDS((2,), jnp.uint32))
    flops = matmul_flops(jax.make_jaxpr(step)(*args).jaxpr)
    report = jaxmem.estimate(step, *args, target="tpu-v5e")
    return flops, report.cost["bytes accessed"]


def main() -> None:
    rows = []
    for name, lean, reference, args, diff in cases():
        ours, theirs = cost(lean, args, diff), cost(reference, args, diff)
        rows.append(_row(name, ours, theirs))
    model = Bert(BertConfig())
    rows.append(
        _row("BERT-Large", bert_step(jaxmem.substitute(model)), bert_step(model))
    )
    flops = ("GFLOP", "reference's", "ratio")
    accessed = ("MiB accessed", "reference's ", "ratio ")
    publish("cost", ("op", *flops, *accessed), rows)


def _row(name, ours, theirs):
    flops = f"{ours[0] / theirs[0]:.3f}" if theirs[0] else ""
    accessed = f"{ours[1] / theirs[1]:.3f}"
    giga = (ours[0] / 1e9, theirs[0] / 1e9)
    return name, *giga, flops, ours[1] / MIB, theirs[1] / MIB, accessed


if __name__ == "__main__":
    main()
