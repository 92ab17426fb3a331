"""The record of attention: how people write it.

The parts vary independently, so the formulas are made in loops: where the scale is
applied, how the mask comes in, a bias, dropout on the probabilities, heads in groups
("in groups": queries are [B, T, K, G, H]; "repeated": keys and values are repeated).
The order of dimensions in the einsums needs no entry of its own (`jaxmem.rewriting`).
"""

import functools
import itertools
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxmem.ops.attention.dot_product import dot_product_attention
from jaxmem.ops.record import Formula, Layers, OpRecord

QUERY, KEY = "batch t n h", "batch s n h"
LOGITS = "#batch #n #t #s"
# Below this a masked logit leaves nothing after the softmax, in any dtype.
FILL = -1e4
# Below this it also swallows a bias that is added to it.
LOW_FILL = -1e9


@dataclass(frozen=True)
class AttentionFormula:
    """One way to write attention."""

    scaled: str = "query"
    mask: str | None = None
    bias: str | None = None
    dropout: str | None = None
    shared_mask: bool = False
    heads: str = "equal"
    swapped: bool = False

    @property
    def examples(self) -> tuple[str, ...]:
        query, key, logits = QUERY, KEY, LOGITS
        if self.heads != "equal":
            query = "batch t n=6 h"
            key = "batch s k=3 h"
        if self.in_groups:
            query = "batch t k=3 g=2 h"
            logits = "#batch #k #g #t #s"
        return (
            *(query, key, key),
            *([f"+{logits}"] * bool(self.bias)),
            *([f"+bool {logits}"] * (self.mask == "mask")),
            *(["key"] * bool(self.dropout)),
        )

    @property
    def in_groups(self) -> bool:
        """Whether logits have an axis of groups, and one of the heads in each."""
        return self.heads == "in groups"

    @property
    def scalars(self) -> tuple[str, ...]:
        fill = ("fill",) if self.mask else ()
        return ("scale", *fill, *(("keep",) if self.dropout else ()))

    @property
    def highest_fill(self) -> float:
        """A row without a key to see must come out as the mean of all values."""
        causal = self.mask != "mask"  # there is no such row
        return FILL if causal or self.bias != "after the mask" else LOW_FILL

    def split(self, extra) -> tuple[Any, Any, Any]:
        """(bias, mask, key) of the arrays after query, key and value."""
        rest = iter(extra)
        there = (self.bias, self.mask == "mask", self.dropout)
        bias, mask, key = (next(rest) if part else None for part in there)
        return bias, mask, key


def _masked(form: AttentionFormula, logits, mask, fill):
    t, s = logits.shape[-2:]
    if form.mask == "tril":
        mask = jnp.tril(jnp.ones((t, s), bool))
    if form.mask == "compare":
        mask = jnp.arange(t)[:, None] >= jnp.arange(s)[None, :]
    return logits if mask is None else jnp.where(mask, logits, fill)


def _dropped(form: AttentionFormula, probs, key, keep):
    if form.dropout is None:
        return probs
    heads = (1,) * (probs.ndim - 3)
    shape = (1, *heads, *probs.shape[-2:]) if form.shared_mask else probs.shape
    mask = jax.random.bernoulli(key, keep, shape)
    if form.dropout == "select":
        return jnp.where(mask, probs / keep, 0)
    return probs * mask.astype(probs.dtype) / keep


def _shared(form: AttentionFormula, query, key, value):
    """(query, key, value, the einsum of the logits) for the way heads are shared."""
    if form.in_groups:
        return query, key, value, "btkgh,bskh->bkgts"
    if form.heads == "repeated":
        repeats = query.shape[2] // key.shape[2]
        key, value = (jnp.repeat(x, repeats, axis=2) for x in (key, value))
    return query, key, value, "btnh,bsnh->bnts"


def _output(form: AttentionFormula, logits, value, rng, keep):
    """What comes after the logits."""
    probs = _dropped(form, jax.nn.softmax(logits, axis=-1), rng, keep)
    to_output = "bkgts,bskh->btkgh" if form.in_groups else "bnts,bsnh->btnh"
    out = jnp.einsum(to_output, probs, value)
    return out.swapaxes(1, 2) if form.swapped else out


def plain_attention(
    form: AttentionFormula, query, key, value, *extra, scale, fill=0, keep=1
):
    """Attention in the form `form`."""
    bias, mask, rng = form.split(extra)
    query, key, value, to_logits = _shared(form, query, key, value)
    query = query * scale if form.scaled == "query" else query
    logits = jnp.einsum(to_logits, query, key)
    logits = logits * scale if form.scaled == "logits" else logits
    if form.bias == "before the mask":
        logits = jnp.add(logits, bias)
    logits = _masked(form, logits, mask, fill)
    if form.bias == "after the mask":
        logits = jnp.add(logits, bias)
    return _output(form, logits, value, rng, keep)


def lean_attention(
    form: AttentionFormula, query, key, value, *extra, scale, fill=0, keep=1
):
    """The same, nothing of size t x s kept."""
    bias, mask, rng = form.split(extra)
    shape = query.shape
    if form.in_groups:
        bias, mask = (_over_heads(x, *shape[2:4]) for x in (bias, mask))
        query = query.reshape(*shape[:2], -1, shape[-1])
    out = dot_product_attention(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=form.mask in ("tril", "compare"),
        dropout_rate=round(1 - keep, 6),
        dropout_rng=rng,
        broadcast_dropout=form.shared_mask,
    )
    if form.in_groups:
        return out.reshape(shape)
    return out.swapaxes(1, 2) if form.swapped else out


def _over_heads(x, groups: int, heads: int):
    """What is added to logits in groups, with one axis of all heads."""
    if x is None:
        return None
    b, k, g, t, s = x.shape
    if (k, g) != (1, 1):
        x = jnp.broadcast_to(x, (b, groups, heads, t, s))
    return x.reshape(b, -1, t, s)


def _allowed(most: float, scale, fill=LOW_FILL, keep=1.0) -> bool:
    return fill <= most and 0 < keep <= 1


def _forms():
    dropouts = [(d, s) for d in ("multiply", "select") for s in (False, True)]
    ways = [("equal", False), ("equal", True), ("in groups", False)]
    for scaled, mask, bias, (dropout, shared), (heads, swapped) in itertools.product(
        ("query", "logits"),
        ("tril", "compare", "mask", None),
        ("before the mask", "after the mask", None),
        (*dropouts, (None, False)),
        ways,
    ):
        orders = mask is not None or bias != "after the mask"
        if orders and not (swapped and dropout):
            parts = scaled, mask, bias, dropout, shared
            yield AttentionFormula(*parts, heads=heads, swapped=swapped)
    for scaled, mask in itertools.product(
        ("query", "logits"), ("tril", "compare", "mask", None)
    ):
        yield AttentionFormula(scaled, mask, heads="repeated")


@functools.cache
def _gate(heads: str, dropout: str | None, shared: bool, swapped: bool) -> Formula:
    """What comes after the logits, whatever they are."""
    form = AttentionFormula(
        dropout=dropout, shared_mask=shared, heads=heads, swapped=swapped
    )

    def plain(logits, value, *key, keep=1):
        return _output(form, logits, value, key[0] if key else None, keep)

    names = "k=3 g=2" if form.in_groups else "n"
    value = "batch s k=3 h" if form.in_groups else "batch s n h"
    return Formula(
        plain,
        examples=(f"batch {names} t s", value, *(["key"] * bool(dropout))),
        scalars=("keep",) if dropout else (),
    )


def attention_formulas() -> tuple[Formula, ...]:
    """Every form, those with more in them first."""
    forms = sorted(_forms(), key=lambda f: -len(f.examples))
    return tuple(
        Formula(
            functools.partial(plain_attention, form),
            lean=functools.partial(lean_attention, form),
            examples=form.examples,
            scalars=form.scalars,
            when=functools.partial(_allowed, form.highest_fill),
            gate=_gate(
                form.heads if form.in_groups else "equal",
                *(form.dropout, form.shared_mask, form.swapped),
            ),
        )
        for form in forms
    )


ATTENTION = OpRecord(
    dot_product_attention,
    attention_formulas(),
    layers=Layers(
        linen=("MultiHeadDotProductAttention",), nnx=("MultiHeadAttention",), bits=True
    ),
)
