"""Says what is being done: a line that changes on a terminal, a few lines in a pipe."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_EVERY = 5.0  # seconds from one plain line to the next
_SIGN_OF_LIFE = 30.0  # seconds after which a line says that work goes on

# Whether to print plain lines where there is no terminal. The command line does; a
# library that a program calls says nothing there.
PLAIN_LINES: ContextVar[bool] = ContextVar("plain_lines", default=False)


@contextmanager
def spinner(show: bool, title: str) -> Iterator[Callable[[str], None]]:
    """Shows a title; the function that it gives shows what is being done now."""
    from rich.console import Console
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if show and PLAIN_LINES.get() and not console.is_terminal:
        with _lines(title) as tell:
            yield tell
        return
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


@contextmanager
def _lines(title: str) -> Iterator[Callable[[str], None]]:
    """Plain lines on stderr: the title, what is new now and then, signs of life."""
    start, over = time.monotonic(), threading.Event()
    said = [start, title]  # when a line was last written, and which

    def say(text: str) -> None:
        said[:] = time.monotonic(), text
        print(text, file=sys.stderr, flush=True)

    def tell(text: str) -> None:
        if time.monotonic() - said[0] >= _EVERY:
            say(f"{title}: {text}")

    def live() -> None:
        while not over.wait(_SIGN_OF_LIFE / 10):
            if time.monotonic() - said[0] >= _SIGN_OF_LIFE:
                say(f"{str(said[1]).split(', ')[0]}, {time.monotonic() - start:.0f} s")

    say(title)
    thread = threading.Thread(target=live, daemon=True)
    thread.start()
    try:
        yield tell
    finally:
        over.set()
        thread.join()
