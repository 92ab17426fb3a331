"""The user's side of a compile: trace a step, lower it for a chip, and export it.

Lowering for a platform needs none of its devices: no plugin is started.
"""

import contextlib
import re
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem import _compat
from jaxmem.chips import Target, chip_mesh, lowered_for, topology, traced_for
from jaxmem.ir import jaxprs, primitives
from jaxmem.ir.jaxprs import walk
from jaxmem.ir.one_gpu import compiled_here
from jaxmem.ir.prints import prints_in, without_prints
from jaxmem.memory.compile import cache
from jaxmem.memory.compile.answer import CompileError
from jaxmem.memory.compile.call import FlatCall, describe_sharding, flatten_call
from jaxmem.memory.compile.facts import StepFacts, facts_of
from jaxmem.memory.compile.fingerprint import fingerprint
from jaxmem.memory.compile.kernels import kernels_in
from jaxmem.memory.compile.workspaces import with_workspaces

_KERNELS = frozenset(
    "core_map for_chip kernel_or_xla mosaic_gpu mpmd_map pallas_call refused".split()
)
_LARGE = 64 * 2**20  # bytes: constants of this size take long to print
_SHOWN_ARGUMENTS = 12
_SHOWN_LINES = 6


@dataclass(frozen=True)
class LoweredStep:
    """A lowered step, ready to be compiled by the worker."""

    call: FlatCall  # what was lowered
    request: dict[str, Any]  # what the worker gets
    key: str  # equal for equal programs, whatever they and their arguments are called
    used: tuple[int, ...]  # indices of the leaves that the program takes
    out_avals: tuple[Any, ...]  # shapes and dtypes of its outputs
    kernels: frozenset[str]  # that it calls, see `kernels_in`
    prints: int  # calls of `jax.debug.print` and the like, which are left out


def flat_function(get: Callable[[], Callable], call: FlatCall) -> Any:
    """A step as a jitted function of its leaves, with their donation."""
    # The `pure_call` that `call` was made of must be open while this is traced.

    def run(*leaves):
        args, kwargs = call.rebuild(leaves)
        return jax.tree.leaves(call.form.pure(get())(*args, **kwargs))

    # Every step has this name, so that the program and its key do not depend on it.
    run.__name__ = run.__qualname__ = "step"
    return jax.jit(run, donate_argnums=_donated(call))


def _donated(call: FlatCall) -> tuple[int, ...]:
    """Positions of the leaves whose buffers the step may reuse."""
    return tuple(i for i, leaf in enumerate(call.leaves) if leaf.donated)


def trace(jitted: Any, call: FlatCall) -> Any:
    """The traced step; an error of the user's function names the user's arguments."""
    with explained(call.name, call):
        return jitted.trace(*(leaf.spec for leaf in call.leaves))


@dataclass(frozen=True)
class TracedCall:
    """A step, traced for the arguments of a call."""

    call: FlatCall
    jitted: Any  # the `flat_function`
    traced: Any

    def facts(self, used: Sequence[int], options: str = "") -> StepFacts:
        """What is known of it; `used`: the leaves that are the module's parameters."""
        return facts_of(self.call, used, self.traced.jaxpr.out_avals, options)


def traced_call(step: Callable, pure: Any, target: Target | None = None) -> TracedCall:
    """Traces a `pure_call` of a step for a chip that may be absent."""
    call = flatten_call(step, pure)
    jitted = flat_function(lambda: step, call)
    with traced_for(target):
        return TracedCall(call, jitted, trace(jitted, call))


@contextlib.contextmanager
def explained(name: str, call: FlatCall | None = None) -> Iterator[None]:
    """Turns an error of tracing into one that names the step and its arguments."""
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.JAXIndexError) as error:
        raise TypeError(
            f"{name} cannot be traced: it needs the value of an array while it is "
            "traced, as an `if`, int() or a shape does. Name arguments that are plain "
            f"Python values in static_argnums. {_first_lines(error, call)}"
        ) from error
    except (TypeError, ValueError) as error:
        if type(error).__module__.startswith("jaxmem."):
            raise  # such as a budget that a scheduled step cannot reach
        text = f"{name} does not take these arguments: {_first_lines(error, call)}"
        text += f"\n{_describe(call)}" if call else ""
        raise (ValueError if isinstance(error, ValueError) else TypeError)(
            text
        ) from error
    except Exception as error:
        error.add_note(
            f"while jaxmem traced {name}" + (_describe(call) if call else "")
        )
        raise


def _first_lines(error: Exception, call: FlatCall | None = None) -> str:
    """The head of jax's message, with the user's names of the arguments."""
    text = "\n".join(str(error).strip().splitlines()[:_SHOWN_LINES])
    if call is None:
        return text
    names = [leaf.name for leaf in call.leaves]
    return re.sub(r"\bleaves\[(\d+)\]", lambda m: names[int(m.group(1))], text)


def _describe(call: FlatCall) -> str:
    shown = [
        f"  {leaf.name}: {leaf.spec.dtype}{list(leaf.spec.shape)}"
        for leaf in call.leaves[:_SHOWN_ARGUMENTS]
    ]
    left = len(call.leaves) - len(shown)
    return "\n".join(["called with:", *shown, *([f"  ... {left} more"] * (left > 0))])


def lower(
    jitted: Any,  # the `flat_function`
    traced: Any,  # its `trace`
    call: FlatCall,  # the call of both
    target: Target,
    compiler_options: dict[str, Any] | None = None,
) -> LoweredStep:
    """Lowers a traced step for a chip and packs it for the worker."""
    _refuse_callbacks(traced, call)
    prints = prints_in(traced.jaxpr)
    if prints:
        jitted, traced = _silent(traced, call)
    call = _replicated(call, traced)
    with (
        _refusals(call, target),
        _compat.no_absent_gpu(),
        # else what was traced for a TPU would be traced anew, for this process
        _compat.traced_for_tpu(target.platform == "tpu"),
        _device_of(target, traced, call),
        warnings.catch_warnings(),
    ):
        # the report names each donation that was not used
        warnings.filterwarnings("ignore", message="Some donated buffers were not")
        exported = with_workspaces(_export(_for_device(jitted, call), call, target))
    request = {
        "target": topology(target.name, exported.nr_devices),
        "donate": _donated(call),
        "shardings": [describe_sharding(leaf.spec.sharding) for leaf in call.leaves],
        "x64": bool(jax.config.read("jax_enable_x64")),
        "compiler_options": compiler_options or None,
    }
    used = tuple(exported.module_kept_var_idx)
    data, module = bytes(exported.serialize()), exported.mlir_module_serialized
    text = None if len(module) > _LARGE else exported.mlir_module()
    return LoweredStep(
        call,
        request=request | {"name": call.name, "used": used, "exported": data},
        key=cache.key_of(fingerprint(module, text), request),
        used=used,
        out_avals=tuple(exported.out_avals),
        kernels=kernels_in(module, text),
        prints=prints,
    )


def _silent(traced: Any, call: FlatCall) -> tuple[Any, Any]:
    """(the `flat_function`, its `trace`) of a step that prints nothing."""
    jitted = _of_jaxpr(without_prints(traced.jaxpr), call)
    return jitted, trace(jitted, call)


def _of_jaxpr(closed: Any, call: FlatCall) -> Any:
    """A `flat_function` that evaluates a jaxpr."""

    def step(*leaves):
        return jaxprs.evaluate(closed, leaves)

    return jax.jit(step, donate_argnums=_donated(call))


def _refuse_callbacks(traced: Any, call: FlatCall) -> None:
    for eqn in walk(traced.jaxpr):
        if primitives.of(eqn).kind is primitives.Kind.CALLBACK:
            raise ValueError(
                f"{call.name} takes values from Python while it runs (jax."
                f"{eqn.primitive.name}), which cannot be compiled for an absent "
                "chip: leave it out of the step to be measured"
            )


def _replicated(call: FlatCall, traced: Any) -> FlatCall:
    """The call with replicated arguments, if the step alone names a mesh."""
    # Without any sharded argument jax would lower a program for one device.
    if any(leaf.spec.sharding is not None for leaf in call.leaves):
        return call
    meshes = (
        eqn.params.get("mesh") or getattr(eqn.params.get("sharding"), "mesh", None)
        for eqn in walk(traced.jaxpr)
    )
    mesh = next((mesh for mesh in meshes if mesh is not None and mesh.size > 1), None)
    if mesh is None:
        return call
    sharding = NamedSharding(mesh, PartitionSpec())
    leaves = (
        replace(leaf, spec=leaf.spec.update(sharding=sharding)) for leaf in call.leaves
    )
    return replace(call, leaves=tuple(leaves))


@contextlib.contextmanager
def _refusals(call: FlatCall, target: Target) -> Iterator[None]:
    """Errors of lowering as those of compiling: the step is not for this chip."""
    # Which kernels and primitives a chip lacks is found out here by some versions of
    # jax, by the compiler in others, and told by errors of any type.
    try:
        yield
    except Exception as error:
        raise CompileError(
            f"{call.name} cannot be lowered for {target.name}: {_first_lines(error)}"
        ) from error


def _export(jitted: Any, call: FlatCall, target: Target) -> export.Exported:
    """Exports a step."""
    # What JAX would partition in calls back into Python, which the worker cannot make,
    # is partitioned here, once it is known how its operands are sharded.
    mesh = _compat.mesh_of_specs(leaf.spec for leaf in call.leaves)
    exported = _export_by(_compat.counted_partitions(mesh), jitted, call, target)
    partitions = _compat.partitions_in(exported)
    if not partitions:
        return exported
    return _export_by(_compat.partitioned_by(partitions, mesh), jitted, call, target)


def _export_by(
    rules: list[tuple[Any, Any]], jitted: Any, call: FlatCall, target: Target
) -> export.Exported:
    """Exports a step, in which some primitives are lowered by other rules."""
    # jax refuses custom calls that a later version may not know. The worker has this
    # same version, so they are allowed by name in a second attempt.
    specs = [leaf.spec for leaf in call.leaves]
    checks: list[export.DisabledSafetyCheck] = []
    for _ in range(2):
        try:
            with compiled_here():
                return _compat.export(jitted, target.platform, checks, rules, specs)
        except ValueError as error:
            names = _custom_calls(str(error))
            if checks or not names:
                raise
            checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    raise AssertionError("the second attempt returns or raises")


def _custom_calls(message: str) -> list[str]:
    """The names in jax's complaint about custom calls."""
    if "compatibility guarantees" not in message:
        return []
    return sorted(set(re.findall(r"custom_call @?\"?([\w.$]+)", message)))


def _kernels(traced: Any) -> list[Any]:
    """The equations that become kernels."""
    return [eqn for eqn in walk(traced.jaxpr) if eqn.primitive.name in _KERNELS]


def _for_device(jitted: Any, call: FlatCall) -> Any:
    """The function, whose kernels find the device of the mesh in context.

    Those of a jaxpr that was made outside of it, as a scheduled step's is, would not.
    """
    if getattr(jax.sharding.get_abstract_mesh(), "abstract_device", None) is None:
        return jitted
    traced = trace(jitted, call)  # in this mesh; jax keeps it for the export
    if not any(eqn.ctx.cur_abstract_mesh.empty for eqn in _kernels(traced)):
        return jitted
    jaxpr = _compat.in_mesh_in_context(traced.jaxpr.jaxpr)
    return _of_jaxpr(traced.jaxpr.replace(jaxpr=jaxpr), call)


@contextlib.contextmanager
def _device_of(target: Target, traced: Any, call: FlatCall) -> Iterator[None]:
    """Lets kernels find out at lowering which chip they are for."""
    # A step with a mesh of its own admits no other mesh around it, and that mesh may be
    # of other devices: there, kernels that state what they need are checked here.
    kernels = _kernels(traced)
    if target.platform == "cpu" or not kernels:
        yield
        return
    mesh = chip_mesh(target)
    if all(leaf.spec.sharding is None for leaf in call.leaves):
        with jax.sharding.use_abstract_mesh(mesh):
            yield
        return
    for needs in (eqn.params.get("needs") for eqn in kernels):
        if needs is not None and needs.platform == target.platform:
            needs.check(mesh.abstract_device)
    with lowered_for(target):
        yield
