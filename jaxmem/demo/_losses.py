"""The loss of a GPT: cross entropy of the next byte, in nats a byte.

Each function takes `forward(params, tokens, key)` and gives
`loss(params, tokens, key)`, in which dropout acts if there is a key.
"""

from collections.abc import Callable

import optax

from jaxmem import ops

_BLOCK = 64  # of 256 bytes, since so few are not divided into blocks by default


def from_logits(forward: Callable) -> Callable:
    """As one writes it."""

    def loss(params, tokens, key=None):
        logits = forward(params, tokens[:, :-1], key)
        return optax.softmax_cross_entropy_with_integer_labels(
            logits, tokens[:, 1:]
        ).mean()

    return loss


def from_hidden(forward: Callable) -> Callable:
    """Of a forward pass that ends before the head: logits never exist whole."""

    def loss(params, tokens, key=None):
        hidden = forward(params, tokens[:, :-1], key)
        head = params["head"]  # of arrays in linen, of Variables in nnx
        return ops.linear_cross_entropy(
            hidden,
            head["kernel"][...],
            tokens[:, 1:],
            head["bias"][...],
            block_size=_BLOCK,
        )

    return loss
