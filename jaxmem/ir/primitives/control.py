"""Primitives with bodies, random numbers, and what leaves the program's own device."""

from functools import partial

from jaxmem.ir.primitives.record import PrimitiveKind as Kind
from jaxmem.ir.primitives.record import PrimitiveRecord as Record

_HASH = 100  # operations of a random word, in terms of an addition

_CALLS = (
    Record("jit", Kind.JIT),
    Record("pjit", Kind.JIT),
    Record("closed_call", Kind.CALL),
    Record("core_call", Kind.CALL),
    Record("eval_jaxpr", Kind.CALL),
    Record("custom_jvp_call", Kind.CUSTOM_JVP),
    Record("custom_vjp_call", Kind.CUSTOM_VJP),
    Record("custom_vjp_call_jaxpr", Kind.CUSTOM_VJP),
    Record("checkpoint", Kind.REMAT),
    Record("remat", Kind.REMAT),
    Record("remat2", Kind.REMAT),
)

_CONTROL = (
    Record("cond", Kind.BRANCH),
    Record("custom_linear_solve", Kind.SOLVE),
    Record("scan", Kind.LOOP),
    Record("shard_map", Kind.SHARD_MAP),
    Record("while", Kind.LOOP, opaque=True),  # how often it iterates is not known
)

_random = partial(Record, kind=Kind.RANDOM, exact=True)
_key = partial(Record, kind=Kind.KEY, exact=True)

_RANDOM = (
    # threefry is arithmetic of integers on a counter: each element by itself
    _random("random_bits", fusible=True, operations=_HASH),
    _random("rng_bit_generator"),
    _random("rng_uniform", opaque=True),  # has a state: it gives others a second time
    _random("threefry2x32", fusible=True, operations=_HASH),
    _key("random_fold_in", fusible=True),
    _key("random_seed", fusible=True),
    _key("random_split", fusible=True),
    _key("random_unwrap", view=True),
    _key("random_wrap", view=True),
)

_sent = partial(Record, kind=Kind.COLLECTIVE)

# Sums over devices have names by versions and modes of JAX.
_COLLECTIVE = (
    Record("psum", Kind.PSUM, sums=True),
    Record("psum2", Kind.PSUM, sums=True),
    Record("psum_invariant", Kind.PSUM, sums=True),
    _sent("all_gather", exact=True),
    _sent("all_gather_invariant", exact=True),
    _sent("all_to_all", exact=True),
    _sent("pbroadcast", exact=True),
    _sent("pmax", exact=True),
    _sent("pmin", exact=True),
    _sent("ppermute", exact=True),
    _sent("ragged_all_to_all", exact=True),
    _sent("reduce_scatter", sums=True),
)

_TRANSFER = (Record("device_put", Kind.TRANSFER, exact=True),)

_KERNEL = tuple(
    Record(name, Kind.KERNEL, opaque=True)
    for name in ("pallas_call", "ffi_call", "custom_call")
)

_CALLBACK = (
    Record("io_callback", Kind.CALLBACK),
    Record("pure_callback", Kind.CALLBACK),
    Record("debug_callback", Kind.PRINT),
    Record("debug_print", Kind.PRINT),
)

RECORDS = (*_CALLS, *_CONTROL, *_RANDOM, *_COLLECTIVE, *_TRANSFER, *_KERNEL, *_CALLBACK)
