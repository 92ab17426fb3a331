"""The lines that install what is missing, as they work where they are printed."""

import importlib.util
import os
import re
import shlex
import shutil
import sys
import sysconfig

# Whether the package index has jaxmem. Until then nothing may install it by its name:
# notebooks take the checkout that they lie in, or a wheel beside them.
PUBLISHED = False


def jaxmem_line(arguments: str) -> str:
    """A line that runs this environment's `jaxmem` command.

    Args:
      arguments: what follows the command's name, such as "targets --install".
    """
    found = shutil.which("jaxmem")
    own = os.path.join(sysconfig.get_path("scripts"), "jaxmem")
    is_own = found and os.path.realpath(found) == os.path.realpath(own)
    command = "jaxmem" if is_own else f"{_python()} -m jaxmem"
    return f"{'!' if _in_notebook() else ''}{command} {arguments}"


def install_line(requirement: str) -> str:
    """A line that installs a package into this environment.

    Args:
      requirement: as pip takes it, such as "matplotlib>=3.9".
    """
    quoted = shlex.quote(requirement)
    if _in_notebook():
        return f"%pip install {quoted}"
    if importlib.util.find_spec("pip") is None:
        return f"uv pip install --python {_python()} {quoted}"
    return f"{_python()} -m pip install {quoted}"


def missing_package(what: str, requirement: str) -> ImportError:
    """The error for a package that is not installed.

    Args:
      what: needs it, such as "drawing".
      requirement: as pip takes it, such as "matplotlib>=3.9".
    """
    name = re.match(r"[\w.-]+", requirement)
    package = name[0] if name else requirement
    return ImportError(f"{what} needs {package}: {install_line(requirement)}")


def _python() -> str:
    return shlex.quote(sys.executable)


def _in_notebook() -> bool:
    """Whether what is printed appears below a cell of a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and hasattr(shell, "kernel")
