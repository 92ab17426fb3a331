"""Where an equation was written: its name scopes, and the line of a user."""

import os
import pathlib

# The name scope that `jax.checkpoint`, and all of this package, recompute under.
RECOMPUTED = "rematted_computation"
_PACKAGE = pathlib.Path(__file__).parent.parent
# The folders of this package, and of the kernels that come with it.
OWN = tuple(
    f"{path}{os.sep}" for path in (_PACKAGE, _PACKAGE.parent / "pallas_kernels")
)
# Its steps are a user's.
_DEMO = f"{_PACKAGE / 'demo'}{os.sep}"
# What these write into a user's step, who called them has not written.
_REWRITERS = tuple(f"{_PACKAGE / name}{os.sep}" for name in ("memory", "scheduling"))
# Parts of the names of files that are nobody's own.
INSTALLED = ("/site-packages/", "/dist-packages/", "<frozen ")


def name_stack(eqn) -> str:
    """The name scopes (module path) of `eqn`."""
    return str(eqn.source_info.name_stack)


def source_line(eqn) -> str:
    """Where `eqn` was written outside of this package, as `file:line (function)`."""
    return caller_line(eqn)


def is_own_file(name: str) -> bool:
    """Whether a file is part of this package, and its lines are no user's."""
    return name.startswith(OWN) and not name.startswith(_DEMO)


def caller_line(eqn, *libraries: str) -> str:
    """The innermost line outside of this package that led to `eqn`, or ""."""
    # `libraries` are parts of the names of other files to look past.
    from jax._src.source_info_util import user_frames

    for frame in user_frames(eqn.source_info.traceback):
        file = frame.file_name
        if file.startswith(_REWRITERS):
            return ""
        if not is_own_file(file) and not any(part in file for part in libraries):
            return f"{frame.file_name}:{frame.start_line} ({frame.function_name})"
    return ""


def is_own_line(eqn) -> bool:
    """Whether a file of this package wrote `eqn`: its innermost line lies in one."""
    from jax._src.source_info_util import user_frames

    innermost = next(iter(user_frames(eqn.source_info.traceback)), None)
    return innermost is not None and innermost.file_name.startswith(OWN)
