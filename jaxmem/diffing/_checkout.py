"""A commit of the repository in the current folder, in a folder of its own."""

import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from jaxmem._checks import wrong_value


@contextmanager
def checkout(name: str, commit: str) -> Iterator[tuple[Path, Path]]:
    """The current folder as it is at a commit, in a git worktree that is removed.

    Args:
      name: of the argument that has the commit, for messages.
      commit: whatever git takes for one.

    Yields:
      The folder, and the root of the repository itself.

    Raises:
      ValueError: no repository, no such commit, or no such folder in it.
    """
    try:
        root = Path(_git("rev-parse", "--show-toplevel"))
        found = _git(
            "rev-parse", "--verify", "--end-of-options", f"{commit}^{{commit}}"
        )
    except (OSError, subprocess.CalledProcessError) as error:
        why = (getattr(error, "stderr", None) or str(error)).strip()
        allowed = f"a commit of a git repository in {Path.cwd()} ({why})"
        raise wrong_value(name, commit, allowed) from None
    with tempfile.TemporaryDirectory(prefix="jaxmem-diff-") as folder:
        tree = Path(folder).resolve() / "tree"
        _git("worktree", "add", "--detach", str(tree), found)
        try:
            inside = tree / Path.cwd().resolve().relative_to(root.resolve())
            if not inside.is_dir():
                raise wrong_value(name, commit, "a commit that has the current folder")
            yield inside, root
        finally:
            _git("worktree", "remove", "--force", str(tree))


def _git(*words: str) -> str:
    done = subprocess.run(
        ["git", *words], check=True, capture_output=True, text=True, timeout=600
    )
    return done.stdout.strip()
