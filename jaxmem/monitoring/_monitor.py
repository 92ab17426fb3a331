"""`monitor`: the memory of a training loop, logged beside the estimate."""

import warnings
from collections.abc import Callable, Sequence
from os import PathLike
from types import TracebackType
from typing import Any

import jax

from jaxmem._bytes import format_bytes, parse_bytes
from jaxmem._checks import check_bool, check_int, wrong_type
from jaxmem.monitoring._count import live_arrays
from jaxmem.monitoring._sinks import JsonLines, sinks_of
from jaxmem.monitoring._statistics import Figures, figures_of, keeps_statistics


def monitor(
    predicted: Any = None,
    *,
    log_to: str | PathLike[str] | Callable | Sequence[Any] | Any = (),
    every: int = 10,
    live: bool | None = None,
    device: Any = None,
) -> "Monitor":
    """Logs what this process's devices hold, in a training loop.

    Args:
      predicted: what to set the measured peak beside: the report of `jaxmem.estimate`,
        a plan of `jaxmem.schedule`, bytes, or text such as "14GiB".
      log_to: the path of a .jsonl file, which is added to; a writer of TensorBoard
        (`add_scalar`, or flax's `scalar`); a run of Weights & Biases (`log`); a
        function of (figures, step); or a sequence of these. Nothing by default.
      every: steps from one record to the next.
      live: whether live arrays are counted, too, which takes time for each array. By
        default only where a device keeps no statistics, as the CPU does not; a warning
        says so.
      device: the `jax.Device` to ask; all of this process by default.

    Returns:
      A `Monitor`: call it with the number of each step.

    Raises:
      TypeError: an argument of another kind.
      ValueError: `every` below 1, bytes or a file that are none.

    Example::

      compiled = jax.jit(step)
      with jaxmem.monitor("1GiB", log_to="memory.jsonl", every=2, live=True) as monitor:
          for i, batch in enumerate(batches):
              state, loss = compiled(state, batch)
              monitor(i)
      print(monitor.row())
    """
    every = check_int("every", every, 1)
    live = live if live is None else check_bool("live", live)
    devices = _devices(device)
    peak = _peak_of(predicted)
    without = not all(map(keeps_statistics, devices))
    counted = without if live is None else live
    found = Monitor(devices, peak, every, counted, sinks_of(log_to))
    if live is not True and without:
        instead = "nothing is measured" if live is False else "live arrays are counted"
        warnings.warn(
            f"jaxmem.monitor: {devices[0]} keeps no memory statistics: {instead}",
            stacklevel=2,
        )
    return found


class Monitor:
    """What `jaxmem.monitor` returns: called in a loop, it logs every so many steps.

    It is a context manager, and `rich` shows it as its row.

    Attributes:
      predicted_bytes: the peak that was predicted, or None.
      last: the figures of the last record, by name; empty before it.
    """

    def __init__(
        self,
        devices: Sequence[Any],
        predicted_bytes: int | None,
        every: int,
        live: bool,
        sinks: Sequence[Callable[[Figures, int], Any]],
    ):
        self.predicted_bytes = predicted_bytes
        self.last: Figures = {}
        self._devices = devices
        self._every = every
        self._sinks = sinks
        self._live = live

    def __call__(self, step: int) -> Figures | None:
        """Records the figures, where the step's number is a multiple of `every`.

        Args:
          step: its number, from 0 or 1 on.

        Returns:
          The figures, or None where nothing was recorded.

        Raises:
          TypeError: `step` is no int.
          ValueError: it is negative.
        """
        step = check_int("step", step, 0)
        if step % self._every:
            return None
        self.last = self.figures()
        for write in self._sinks:
            write(self.last, step)
        return self.last

    def figures(self) -> Figures:
        """What is measured now, by name; nothing is logged.

        `peak_bytes`, `bytes_in_use`, `bytes_limit` and `largest_free_block_bytes` are
        those of the device's allocator, the peak since the process began;
        `fragmentation` is the part of the free memory that is not in the largest free
        block. Of several devices each figure is that of the one with the least room,
        and each device has figures of its own, as `device_3/peak_bytes`.
        """
        figures = figures_of(self._devices)
        if self._live:
            alive = live_arrays()
            names = [str(device) for device in self._devices]
            sizes = [alive.devices.get(name, 0) for name in names]
            figures |= {"live_bytes": max(sizes), "live_arrays": alive.count}
        if self.predicted_bytes is not None:
            figures["predicted_peak_bytes"] = self.predicted_bytes
        return figures

    def postfix(self) -> dict[str, str]:
        """The last figures for `tqdm`'s `set_postfix`, in the order of `row`."""
        figures = self.last or self.figures()
        cells: dict[str, str] = {}
        if "bytes_in_use" in figures:
            cells["memory"] = _of(figures["bytes_in_use"], figures.get("bytes_limit"))
        names = {"peak_bytes": "peak", "live_bytes": "live"}
        names["predicted_peak_bytes"] = "predicted"
        for name, shown in names.items():
            if name in figures:
                cells[shown] = format_bytes(figures[name])
        return cells

    def row(self) -> str:
        """The last figures in a short line, for a progress bar.

        As in "memory 12.3/15.8 GiB, peak 14.1 GiB, predicted 14.0 GiB".
        """
        return ", ".join(f"{name} {size}" for name, size in self.postfix().items())

    def close(self) -> None:
        """Closes the file; what was given open is left to its owner."""
        for sink in self._sinks:
            if isinstance(sink, JsonLines):
                sink.close()

    def __enter__(self) -> "Monitor":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def __rich__(self) -> Any:
        from rich.text import Text

        return Text(self.row())


def _devices(device: Any) -> list[Any]:
    if device is None:
        return jax.local_devices()
    if not callable(getattr(device, "memory_stats", None)):
        raise wrong_type("device", device, "a jax.Device, as jax.devices() lists them")
    return [device]


def _peak_of(predicted: Any) -> int | None:
    """Of a report, of a plan (compiled, or else from its graph), or of bytes."""
    if predicted is None:
        return None
    report = getattr(predicted, "scheduled", None) or predicted
    for name in ("peak_bytes", "predicted_bytes"):
        if isinstance(peak := getattr(report, name, None), int):
            return peak
    if isinstance(predicted, str | int | float) and not isinstance(predicted, bool):
        return parse_bytes(predicted, "predicted")
    allowed = "a report of jaxmem.estimate, a plan, bytes, or text such as '14GiB'"
    raise wrong_type("predicted", predicted, allowed)


def _of(used: float, limit: float | None) -> str:
    """`12.3/15.8 GiB`; with both units where these differ."""
    if limit is None:
        return format_bytes(used)
    used_text, limit_text = format_bytes(used), format_bytes(limit)
    number, unit = used_text.split()
    return f"{number if unit in limit_text.split() else used_text}/{limit_text}"
