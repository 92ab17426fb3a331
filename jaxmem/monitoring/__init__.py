"""Memory of a process that is training: what is alive, and what its devices measure.

`_buffers.py` tells which bytes an array takes, `_count.py` counts those of a process,
`_live_arrays.py` is what `live_arrays` returns, with a `_live_array.py` for each row,
and `_text.py` prints it. `_monitor.py` is
called in a training loop, `_statistics.py` asks a device, `_sinks.py` writes.
"""

from jaxmem.monitoring._count import live_arrays as live_arrays
from jaxmem.monitoring._live_array import LiveArray as LiveArray
from jaxmem.monitoring._live_arrays import LiveArrays as LiveArrays
from jaxmem.monitoring._live_arrays import LiveArraysChange as LiveArraysChange
from jaxmem.monitoring._monitor import Monitor as Monitor
from jaxmem.monitoring._monitor import monitor as monitor

__all__ = [
    "live_arrays",
    "monitor",
]
