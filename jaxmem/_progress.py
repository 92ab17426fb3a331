"""A line on the terminal that says what is being done; nothing without a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def spinner(show: bool, title: str) -> Iterator[Callable[[str], None]]:
    """Shows a title; the function that it gives shows what is being done now."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    progress = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=console,
        transient=True,
        disable=not (show and console.is_terminal),
    )
    task = progress.add_task(title, total=None)
    with progress:
        yield lambda text: progress.update(task, description=f"{title}: {text}")
