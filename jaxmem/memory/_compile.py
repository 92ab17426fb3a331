"""The user's side of a compile: trace the step, lower it for the target, export it.

Nothing here starts a plugin or looks at the default backend: lowering for a platform
needs none of its devices. The worker turns the artefact into a program.
"""

import contextlib
import dataclasses
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jax import export
from jax.sharding import NamedSharding, PartitionSpec

from jaxmem._jaxpr import walk
from jaxmem.memory import _cache
from jaxmem.memory._fingerprint import fingerprint
from jaxmem.memory._step import Step, describe_sharding
from jaxmem.memory._targets import Target, chip_mesh, topology

_CALLBACKS = ("debug_callback", "debug_print", "io_callback", "pure_callback")
_KERNELS = frozenset(
    "core_map for_chip kernel_or_xla mosaic_gpu mpmd_map pallas_call".split()
)
# what they are lowered to, which the compiler hands to another one
_KERNEL_CALLS = (b"mosaic_gpu", b"tpu_custom_call", b"triton")
_SHOWN_ARGUMENTS = 12


@dataclasses.dataclass(frozen=True)
class Artefact:
    """A lowered step, ready to be compiled elsewhere.

    Attributes:
      request: what the worker gets.
      key: the same for the same program, whatever it and its arguments are called.
      kept: the leaves that the program takes; the step does not read the others.
      out_avals: of its outputs.
      kernels: whether it calls code that is not XLA's.
    """

    request: dict[str, Any]
    key: str
    kept: tuple[int, ...]
    out_avals: tuple[Any, ...]
    kernels: bool


def flat_function(get: Callable[[], Callable], step: Step) -> Any:
    """The step as a function of its leaves, jitted with their donation.

    An open call (`pure_call`) of the step's form must be round its tracing.

    Args:
      get: gives the user's function, such as a weak reference to it.
      step: a call of it.
    """

    def run(*leaves):
        args, kwargs = step.rebuild(leaves)
        return jax.tree.leaves(step.form.pure(get())(*args, **kwargs))

    # one name for all steps: the program, and so its key, does not depend on it
    run.__name__ = run.__qualname__ = "step"
    donate = tuple(i for i, leaf in enumerate(step.leaves) if leaf.donated)
    return jax.jit(run, donate_argnums=donate)


def trace(jitted: Any, step: Step) -> Any:
    """The traced step; what goes wrong is said in terms of the user's arguments."""
    with explained(step.name, step):
        traced = jitted.trace(*(leaf.spec for leaf in step.leaves))
    for eqn in walk(traced.jaxpr):
        if eqn.primitive.name in _CALLBACKS:
            raise ValueError(
                f"{step.name} calls back into Python ({eqn.primitive.name}, as made by "
                "jax.debug.print and jax.pure_callback), which cannot be compiled for "
                "a chip that is not there: leave it out of the step to be measured"
            )
    return traced


@contextlib.contextmanager
def explained(name: str, step: Step | None = None) -> Iterator[None]:
    """Turns an error of tracing into one that names the step and its arguments."""
    try:
        yield
    except (jax.errors.ConcretizationTypeError, jax.errors.JAXIndexError) as error:
        raise TypeError(
            f"{name} cannot be traced: it needs the value of an array while it is "
            "traced, as an `if`, int() or a shape does. Name arguments that are plain "
            f"Python values in static_argnums. {_first_lines(error, step)}"
        ) from error
    except (TypeError, ValueError) as error:
        text = f"{name} does not take these arguments: {_first_lines(error, step)}"
        text += f"\n{_describe(step)}" if step else ""
        raise (ValueError if isinstance(error, ValueError) else TypeError)(
            text
        ) from error
    except Exception as error:
        error.add_note(
            f"while jaxmem traced {name}" + (_describe(step) if step else "")
        )
        raise


def _first_lines(error: Exception, step: Step | None = None) -> str:
    """The head of jax's message, the flat arguments under the user's names."""
    text = "\n".join(str(error).strip().splitlines()[:6])
    if step is None:
        return text
    names = [leaf.name for leaf in step.leaves]
    return re.sub(r"\bleaves\[(\d+)\]", lambda m: names[int(m.group(1))], text)


def _describe(step: Step) -> str:
    shown = [
        f"  {leaf.name}: {leaf.spec.dtype}{list(leaf.spec.shape)}"
        for leaf in step.leaves[:_SHOWN_ARGUMENTS]
    ]
    left = len(step.leaves) - len(shown)
    return "\n".join(["called with:", *shown, *([f"  ... {left} more"] * (left > 0))])


def spread(step: Step, traced: Any) -> Step:
    """The step with whole copies of its arguments, if only its inside names a mesh.

    Lowered without any sharded argument it would be a program for one device.
    """
    if any(leaf.spec.sharding is not None for leaf in step.leaves):
        return step
    meshes = (
        eqn.params.get("mesh") or getattr(eqn.params.get("sharding"), "mesh", None)
        for eqn in walk(traced.jaxpr)
    )
    mesh = next((mesh for mesh in meshes if mesh is not None and mesh.size > 1), None)
    if mesh is None:
        return step
    whole = NamedSharding(mesh, PartitionSpec())
    leaves = [
        dataclasses.replace(leaf, spec=leaf.spec.update(sharding=whole))
        for leaf in step.leaves
    ]
    return dataclasses.replace(step, leaves=tuple(leaves))


def lower(
    jitted: Any,
    traced: Any,
    step: Step,
    target: Target,
    compiler_options: dict[str, Any] | None = None,
) -> Artefact:
    """Lowers a traced step for the target and packs it for a worker."""
    with _device_of(target, traced, step), warnings.catch_warnings():
        # the report tells of each donation that was not used, by name
        warnings.filterwarnings("ignore", message="Some donated buffers were not")
        exported = _export(jitted, step, target)
    request = {
        "target": topology(target.name, exported.nr_devices),
        "donate": tuple(i for i, leaf in enumerate(step.leaves) if leaf.donated),
        "shardings": [describe_sharding(leaf.spec.sharding) for leaf in step.leaves],
        "x64": bool(jax.config.read("jax_enable_x64")),
        "compiler_options": compiler_options or None,
    }
    kept = tuple(exported.module_kept_var_idx)
    data = bytes(exported.serialize())
    return Artefact(
        request=request | {"name": step.name, "kept": kept, "exported": data},
        key=_cache.key_of(fingerprint(exported), request),
        kept=kept,
        out_avals=tuple(exported.out_avals),
        kernels=any(name in data for name in _KERNEL_CALLS),
    )


def _export(jitted: Any, step: Step, target: Target) -> export.Exported:
    """Exports; custom calls without a promise of stability go to this same jax."""
    specs = [leaf.spec for leaf in step.leaves]
    checks: list[export.DisabledSafetyCheck] = []
    for _ in range(2):
        try:
            return export.export(
                jitted, platforms=[target.platform], disabled_checks=checks
            )(*specs)
        except ValueError as error:
            names = _custom_calls(str(error))
            if checks or not names:
                raise ValueError(
                    f"{step.name} cannot be lowered for {target.name}: "
                    f"{_first_lines(error)}"
                ) from error
            checks = [export.DisabledSafetyCheck.custom_call(name) for name in names]
    raise AssertionError("the second attempt returns or raises")


def _custom_calls(message: str) -> list[str]:
    """The names in jax's complaint about custom calls."""
    if "compatibility guarantees" not in message:
        return []
    return sorted(set(re.findall(r"custom_call @?\"?([\w.$]+)", message)))


@contextlib.contextmanager
def _device_of(target: Target, traced: Any, step: Step) -> Iterator[None]:
    """Kernels ask at lowering which chip they are for; there is none here to ask.

    Where the step has a mesh of its own no other can be set round it, and that may be
    of other devices: kernels that say what they need are asked here.
    """
    asks = [eqn for eqn in walk(traced.jaxpr) if eqn.primitive.name in _KERNELS]
    if target.platform == "cpu" or not asks:
        yield
        return
    mesh = chip_mesh(target)
    if all(leaf.spec.sharding is None for leaf in step.leaves):
        with jax.sharding.use_abstract_mesh(mesh):
            yield
        return
    for needs in (eqn.params.get("needs") for eqn in asks):
        if needs is not None and needs.platform == target.platform:
            needs.check(mesh.abstract_device)
    yield
