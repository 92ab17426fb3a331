"""Values that are kept for the backward pass, and need not be."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp

from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.primitives import Kind
from jaxmem.ir.scans import is_var
from jaxmem.linting._kept import Definition, definition_of, kept_values
from jaxmem.linting._subject import Finding, Subject, SubjectLevel, array


def wide_copy(subject: Subject) -> Iterator[Finding]:
    """Finds kept float32 copies of bfloat16 values, which have the same information."""
    # Where the narrow value is in memory anyway (it is kept as well, or is an argument
    # or a weight) the copy costs all its bytes, else the difference of the two.
    level = SubjectLevel.of(subject.live)
    values = list(kept_values(level))
    kept_keys = {value.definition.key for value in values}
    for value in values:
        copy = value.definition
        source = _cast_from(copy)
        if source is None or copy.is_own:
            continue
        wide, narrow = copy.var.aval, source.aval
        what = f"{array(wide)} is kept for the backward pass, a copy of {narrow.dtype}"
        original = definition_of(copy.level, source)
        is_input = original.eqn is None and original.var not in original.level.carry
        in_memory = is_input or (*copy.calls, *original.key) in kept_keys
        share = 1 if in_memory else 1 - narrow.dtype.itemsize / wide.dtype.itemsize
        yield Finding(
            check="wide copy",
            severity="warning",
            what=what,
            bytes=int(share * value.bytes),
            remedy=(
                "recompute the cast in the backward pass: jaxmem.substitute for layers "
                "that it knows, jaxmem.schedule for scanned layers, else jax.checkpoint"
            ),
            **copy.place(),
        )


def _cast_from(copy: Definition):
    """The narrower float that a value is a cast of, or None."""
    eqn = copy.eqn
    if eqn is not None and eqn.primitive.name == "mul":  # by 2, as kept for a square
        scaled = [v for v in eqn.invars if is_var(v)]
        eqn = copy.level.maker(scaled[0]) if len(scaled) == 1 else None
    if eqn is None or not primitives.is_cast(eqn):
        return None
    source = eqn.invars[0]
    types = source.aval.dtype, copy.var.aval.dtype
    if not is_var(source) or not all(jnp.issubdtype(t, jnp.floating) for t in types):
        return None
    return source if types[0].itemsize < types[1].itemsize else None


# Between the comparison and what multiplies or selects, beside a cast and a shape.
_OF_A_MASK = ("and", "div", "mul", "not", "select_n")


def dropout_mask(subject: Subject) -> Iterator[Finding]:
    """Finds kept masks: random bits against a threshold, of no data."""
    # Noise is none, such as the latents of a GAN or what diffusion adds to an image.
    for value in kept_values(SubjectLevel.of(subject.live)):
        mask = value.definition
        if mask.eqn is not None and not mask.is_own and _is_mask(mask):
            yield Finding(
                check="dropout mask",
                severity="warning",
                what=f"{array(mask.var.aval)}, a mask of random bits, is kept for "
                "the backward pass",
                bytes=value.bytes,
                remedy=(
                    "keep the key and recompute the bits: jaxmem.substitute, "
                    "jaxmem.nn.linen.Dropout or jaxmem.ops.dropout"
                ),
                **mask.place(),
            )


def _is_mask(mask: Definition) -> bool:
    """Whether it says of each element whether random bits are below a number."""
    todo, compared = [(mask.level, mask.var)], []
    while todo:
        found = definition_of(*todo.pop())
        if found.eqn is None:
            return False
        known = primitives.of(found.eqn)
        if known.orders:
            compared.append(found)
        elif known.rearranges or known.name in _OF_A_MASK:
            arrays = (v for v in found.eqn.invars if is_var(v) and v.aval.size > 1)
            todo += ((found.level, v) for v in arrays)
        else:
            return False
    return any(map(_is_random, compared))


def _is_random(value: Definition) -> bool:
    """Whether it depends on a key alone: the sign of data, as of relu, does not."""
    graph = value.level.graph
    eqns = [graph.eqns[i] for i in graph.cone([value.var])]
    read = {v for eqn in eqns for v in filter(is_var, eqn.invars)}
    if not all(_is_key_like(v.aval) for v in read - graph.maker.keys()):
        return False
    inside = (e for eqn in eqns for b in jaxprs.bodies(eqn) for e in jaxprs.walk(b))
    return any(primitives.of(e).kind is Kind.RANDOM for e in (*eqns, *inside))


def _is_key_like(aval) -> bool:
    """Integers, keys, and single numbers such as a rate."""
    key = jax.dtypes.issubdtype(aval.dtype, jax.dtypes.prng_key)
    return key or aval.size == 1 or jnp.issubdtype(aval.dtype, jnp.integer)
