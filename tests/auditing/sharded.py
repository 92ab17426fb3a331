"""Steps over eight devices of many kinds, and what compilers make of them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxmem.chips import get_target
from jaxmem.frameworks import pure_call
from jaxmem.memory.compile import compile_program, traced_call

P = PartitionSpec
B, T, D, H, V = 16, 32, 64, 4, 256  # examples, positions, features, heads, words


def mesh_of(**axes):
    devices = np.array(jax.devices("cpu")[:8]).reshape(tuple(axes.values()))
    return Mesh(devices, tuple(axes))


def shape(mesh, sizes, *spec, dtype=jnp.float32):
    sharding = NamedSharding(mesh, P(*spec))
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=sharding)


def descent(loss):
    """A step of gradient descent, which returns the loss too."""

    def step(params, *batch):
        value, grads = jax.value_and_grad(loss)(params, *batch)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value

    return step


def mlp(params, x, y):
    h = jax.nn.gelu(x @ params["up"] + params["bias"][None])
    return jnp.mean((h @ params["down"] - y) ** 2)


def of_mlp(mesh, up, down, batch):
    params = {
        "up": shape(mesh, (D, 4 * D), *up),
        "bias": shape(mesh, (4 * D,), *up[1:]),
        "down": shape(mesh, (4 * D, D), *down),
    }
    x = shape(mesh, (B, D), *batch)
    return descent(mlp), (params, x, x)


def data():
    return of_mlp(mesh_of(data=8), (), (), ("data",))


def fully_sharded():
    return of_mlp(mesh_of(data=8), ("data", None), ("data", None), ("data",))


def tensor():
    mesh = mesh_of(model=8)
    return of_mlp(mesh, (None, "model"), ("model", None), ())


def both():
    mesh = mesh_of(data=2, model=4)
    return of_mlp(mesh, (None, "model"), ("model", None), ("data",))


def three():
    mesh = mesh_of(data=2, fsdp=2, model=2)
    axes = ("fsdp", "model"), ("model", "fsdp"), (("data", "fsdp"),)
    return of_mlp(mesh, *axes)


def _norm(x):
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def _attention(x, w):
    q, k, v = jnp.moveaxis(jnp.einsum("btd,dchf->btchf", x, w), 2, 0)
    scores = jnp.einsum("bthf,bshf->bhts", q, k)
    mask = jnp.tril(jnp.ones((1, 1, *scores.shape[-2:]), bool))
    probs = jax.nn.softmax(jnp.where(mask, scores, -1e9), axis=-1)
    return jnp.einsum("bhts,bshf->bthf", probs, v)


def language(params, tokens, key=None):
    x = params["embed"][tokens]

    def layer(x, w):
        heads = _attention(_norm(x), w["qkv"])
        x = x + jnp.einsum("bthf,hfd->btd", heads, w["out"])
        if key is not None:
            x = jnp.where(jax.random.bernoulli(key, 0.9, x.shape), x / 0.9, 0)
        h = jax.nn.gelu(_norm(x) @ w["up"])
        return x + h @ w["down"], None

    x, _ = jax.lax.scan(jax.checkpoint(layer), x, params["layers"])
    logits = (_norm(x) @ params["embed"].T).astype(jnp.float32)
    rows = jnp.take_along_axis(logits, jnp.roll(tokens, -1, 1)[..., None], -1)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - rows[..., 0])


def of_language(mesh, model, fsdp, batch, words=None, dtype=jnp.bfloat16):
    like = lambda sizes, *spec: shape(mesh, sizes, *spec, dtype=dtype)
    layers = {
        "qkv": like((3, D, 3, H, D // H), None, fsdp, None, model),
        "out": like((3, H, D // H, D), None, model, None, fsdp),
        "up": like((3, D, 4 * D), None, fsdp, model),
        "down": like((3, 4 * D, D), None, model, fsdp),
    }
    params = {"embed": like((V, D), words, fsdp), "layers": layers}
    return params, shape(mesh, (B, T), *batch, dtype=jnp.int32)


def transformer():
    mesh = mesh_of(data=2, model=4)
    return descent(language), of_language(mesh, "model", "data", ("data",), "model")


def transformer_of_data():
    return descent(language), of_language(mesh_of(data=8), None, None, ("data",))


def sequences():
    """Positions are sharded as well as examples."""
    mesh = mesh_of(data=2, context=4)
    args = of_language(mesh, None, "data", ("data", "context"))
    return descent(language), args


def with_dropout():
    mesh = mesh_of(data=4, model=2)
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    step = lambda params, tokens, key: descent(language)(params, tokens, key)
    return step, (*of_language(mesh, "model", None, ("data",)), key)


def micro_batches():
    mesh = mesh_of(data=2, model=4)

    def step(params, tokens):
        def body(total, part):
            grads = jax.grad(language)(params, part)
            return jax.tree.map(jnp.add, total, grads), None

        zeros = jax.tree.map(jnp.zeros_like, params)
        parts = tokens.reshape(4, B // 4, T)
        total, _ = jax.lax.scan(body, zeros, parts)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, total)

    return step, of_language(mesh, "model", "data", ("data",), "model", jnp.float32)


def adam():
    """The moments are sharded where the weights are not."""
    mesh = mesh_of(data=8)
    optimizer = optax.adamw(1e-3)
    params = {"w": shape(mesh, (D, 4 * D)), "v": shape(mesh, (4 * D, D))}
    state = jax.eval_shape(optimizer.init, params)
    sharded = lambda one: shape(mesh, one.shape, *("data",)[: one.ndim])
    state = jax.tree.map(lambda one: sharded(one) if one.ndim else one, state)

    def step(params, state, x):
        loss = lambda p: jnp.mean((jnp.tanh(x @ p["w"]) @ p["v"]) ** 2)
        grads = jax.grad(loss)(params)
        updates, state = optimizer.update(grads, state, params)
        size = sum(jnp.sum(g * g) for g in jax.tree.leaves(grads))
        return optax.apply_updates(params, updates), state, size

    return step, (params, state, shape(mesh, (B, D), "data"))


def summed_by_hand():
    mesh = mesh_of(data=8)

    def local(w, x):
        value, grad = jax.value_and_grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)
        return w - jax.lax.pmean(grad, "data"), jax.lax.pmean(value, "data")

    whole = {"in_specs": (P(), P("data")), "out_specs": (P(), P())}
    step = jax.shard_map(local, mesh=mesh, **whole, check_vma=False)
    return step, (shape(mesh, (D, D)), shape(mesh, (B, D), "data"))


def ring():
    """Keys and values go around, as in ring attention."""
    mesh = mesh_of(context=8)
    around = [(i, (i + 1) % 8) for i in range(8)]

    def local(q, k, v):
        def hop(carry, _):
            k, v, total, weight = carry
            scores = jnp.exp(q @ k.T)
            total, weight = total + scores @ v, weight + scores.sum(-1, keepdims=True)
            k, v = (jax.lax.ppermute(one, "context", around) for one in (k, v))
            return (k, v, total, weight), None

        start = k, v, jnp.zeros_like(q), jnp.zeros_like(q[:, :1])
        (_, _, total, weight), _ = jax.lax.scan(hop, start, length=8)
        return total / weight

    specs = {"in_specs": P("context"), "out_specs": P("context")}
    attend = jax.shard_map(local, mesh=mesh, **specs, check_vma=False)
    loss = lambda q, k, v: jnp.mean(attend(q, k, v) ** 2)
    x = shape(mesh, (8 * T, D), "context")
    return jax.value_and_grad(loss, (0, 1, 2)), (x, x, x)


def experts():
    """Tokens go to the devices of their experts, and back."""
    mesh = mesh_of(expert=8)

    def local(x, router, up, down):
        picked = jnp.argmax(x @ router, axis=-1)
        slots = jax.nn.one_hot(picked, 8, dtype=x.dtype)
        sent = jnp.einsum("td,te->etd", x, slots)
        got = jax.lax.all_to_all(sent, "expert", 0, 0, tiled=True)
        done = jax.nn.relu(got @ up[0]) @ down[0]
        back = jax.lax.all_to_all(done, "expert", 0, 0, tiled=True)
        return jnp.sum(back, axis=0), jax.lax.pmean(slots.mean(0), "expert")

    specs = P("expert"), P(), P("expert"), P("expert")
    layer = jax.shard_map(
        local, mesh=mesh, in_specs=specs, out_specs=(P("expert"), P())
    )

    def loss(weights, x):
        y, load = layer(x, *weights)
        return jnp.mean(y**2) + jnp.sum(load**2)

    weights = (
        shape(mesh, (D, 8)),
        shape(mesh, (8, D, 2 * D), "expert"),
        shape(mesh, (8, 2 * D, D), "expert"),
    )
    return descent(loss), (weights, shape(mesh, (8 * T, D), "expert"))


def images():
    """Rows of images are sharded: neighbours exchange their edges."""
    mesh = mesh_of(data=2, rows=4)

    def loss(kernel, x):
        y = jax.lax.conv_general_dilated(
            x, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        return jnp.mean(jnp.max(jax.nn.relu(y), axis=(1, 2)) ** 2)

    x = shape(mesh, (4, 32, 32, 8), "data", "rows")
    return descent(loss), (shape(mesh, (3, 3, 8, 8)), x)


def rows_of_table():
    """A table of embeddings is sharded by its rows."""
    mesh = mesh_of(data=2, model=4)

    def loss(params, ids, y):
        pooled = params["table"][ids].sum(axis=1)
        return jnp.mean((pooled @ params["w"] - y) ** 2)

    params = {
        "table": shape(mesh, (8 * V, D), "model"),
        "w": shape(mesh, (D, 8)),
    }
    batch = shape(mesh, (B, 4), "data", dtype=jnp.int32), shape(mesh, (B, 8), "data")
    return descent(loss), (params, *batch)


def until_small():
    """A loop that every device leaves at once, and a branch that all take."""
    mesh = mesh_of(data=8)

    def step(w, x):
        def again(carry):
            w, size, n = carry
            grad = jax.grad(lambda w: jnp.mean((x @ w) ** 2))(w)
            size = jnp.sum(grad**2)
            w = jax.lax.cond(size > 1, lambda w: w - 0.2 * grad, lambda w: w - grad, w)
            return w, size, n + 1

        more = lambda carry: (carry[1] > 1e-3) & (carry[2] < 10)
        return jax.lax.while_loop(more, again, (w, jnp.float32(1), 0))

    return step, (shape(mesh, (D, 8)), shape(mesh, (B, D), "data"))


STEPS = {
    made.__name__: made
    for made in (
        *(data, fully_sharded, tensor, both, three, transformer, transformer_of_data),
        *(sequences, with_dropout, micro_batches, adam, summed_by_hand, ring),
        *(experts, images, rows_of_table, until_small),
    )
}


@functools.cache
def compiled(name, target="cpu"):
    """(text of the module, that of its buffers, what is known of the step)."""
    step, args = STEPS[name]()
    chip = get_target(target)
    with pure_call(step, args, {}, None, ()) as pure:
        traced = traced_call(step, pure, chip)
        program = compile_program(traced, chip, 600)
    return program.hlo, program.assignment, traced.facts(program.used)
