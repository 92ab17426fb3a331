"""A train step that an L4 has no memory for, and what `jaxmem.explain` says of it."""

import jax
import jax.numpy as jnp
import optax

import jaxmem

WIDTH, WORDS, TOKENS = 1024, 131_072, 24_576
tx = optax.adam(1e-3)


def loss_fn(params, tokens):
    x = params["embed"][tokens]
    with jax.named_scope("head"):
        logits = x @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens).mean()


def train_step(state, tokens):
    params, opt_state = state
    loss, grads = jax.value_and_grad(loss_fn)(params, tokens)
    updates, opt_state = tx.update(grads, opt_state, params)
    return (optax.apply_updates(params, updates), opt_state), loss


def make_state():
    params = {"embed": jnp.zeros((WORDS, WIDTH)), "head": jnp.zeros((WIDTH, WORDS))}
    return params, tx.init(params)


LOG = """
Allocator (GPU_0_bfc) ran out of memory trying to allocate 24.75GiB (rounded)
jax.errors.JaxRuntimeError: RESOURCE_EXHAUSTED: Out of memory while trying to allocate \
24.75GiB. [executable_name='jit_train_step']
"""
args = jax.eval_shape(make_state), jax.ShapeDtypeStruct((TOKENS,), jnp.int32)
print(jaxmem.explain(LOG, train_step, *args, target="l4", donate_argnums=0))
