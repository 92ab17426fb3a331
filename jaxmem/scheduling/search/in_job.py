"""One search for all processes of a job, which then run one program.

The first process whose devices a step uses searches; the others read from the job's
coordination service what it has found. Nothing waits for all of them: a process may ask
for a plan alone.
"""

import logging
import pickle
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jaxmem import _compat
from jaxmem._checks import array_text
from jaxmem.ir.jaxprs import is_array
from jaxmem.scheduling._choice import Choice
from jaxmem.scheduling._rewritten import Rewritten
from jaxmem.scheduling.search import heartbeat
from jaxmem.scheduling.search.outcome import SearchOutcome
from jaxmem.scheduling.search.store import Store

_LOGGER = logging.getLogger("jaxmem")
_FOLDER = "jaxmem/search"
_POLL = 1.0  # seconds
_PATIENCE = 30.0  # seconds, for the first process to ask for a plan of this step
_SHOWN = 3  # differences

About = Mapping[str, str]  # a step's arguments by name, and what else tells it apart


def first_process(shardings: tuple[Any, ...]) -> int | None:
    """The first process that holds a part of these arrays; None where one holds all."""
    # devices of a `target_mesh` are those of no process
    there = (s for s in shardings if s is not None and not _is_abstract(s))
    beyond = [s for s in there if not s.is_fully_addressable]
    devices = (d for sharding in beyond for d in sharding.device_set)
    return min((d.process_index for d in devices), default=None)


def _is_abstract(sharding) -> bool:
    return isinstance(getattr(sharding, "mesh", None), jax.sharding.AbstractMesh)


def described(arguments: Any, shardings: tuple[Any, ...]) -> About:
    """The arguments of a step by name, as `in_job` compares them."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(arguments)
    arrays = [(path, x) for path, x in leaves if is_array(x)]
    found = {}
    for (path, x), sharding in zip(arrays, shardings, strict=True):
        text = array_text(x)
        spec = "" if sharding is None else f" {getattr(sharding, 'spec', sharding)}"
        found[jax.tree_util.keystr(path)] = text + spec
    return found


def in_job(
    key: str,
    name: str,
    about: About,
    rewritten: Callable[[Choice], Rewritten],
    search: Callable[[], SearchOutcome],
    first: int,
    store: Store | None = None,
) -> SearchOutcome:
    """The outcome that process `first` finds, or has found.

    Args:
      key: of `search_key`, the same in all processes.
      name: of the step.
      about: what an error compares, if the processes have different steps.
      rewritten: makes the step under a choice.
      search: makes the outcome; called in process `first` alone.
      first: the index of a process, of `first_process`.
      store: what the processes share; by default the job's own.

    Raises:
      ValueError: this process's step is not the one that `first` searches for.
      RuntimeError: the search has failed in `first`, or that process is gone, or the
        choice makes another program here.
    """
    store = _compat.JobStore() if store is None else store
    if jax.process_index() == first:
        return _told(key, name, about, search, store)
    data = _received(key, name, about, first, store)
    if (failed := pickle.loads(data)[0]) is not None:
        raise RuntimeError(f"schedule of {name}: process {first} has failed: {failed}")
    outcome = SearchOutcome.from_bytes(pickle.loads(data)[1], rewritten)
    if outcome is None:
        raise RuntimeError(
            f"schedule of {name}: the plan of process {first} makes another program in "
            f"process {jax.process_index()}: do both run the same code?"
        )
    return outcome


def _told(key: str, name: str, about: About, search, store: Store) -> SearchOutcome:
    """Searches, and tells the others."""
    store.set(f"{_FOLDER}/steps/{name}/{key}", pickle.dumps(dict(about)))
    try:
        with heartbeat.beating(f"{_FOLDER}/alive/{key}", store):
            outcome = search()
    except BaseException as error:  # an interrupt too: the others wait
        failed = f"{type(error).__name__}: {error}"
        store.set(f"{_FOLDER}/found/{key}", pickle.dumps((failed, b"")))
        raise
    found = pickle.dumps((None, outcome.to_bytes(report=False)))
    store.set(f"{_FOLDER}/found/{key}", found)
    return outcome


def _received(key: str, name: str, about: About, first: int, store: Store) -> bytes:
    """What the first process has found; waits for it."""
    listener = heartbeat.Listener(f"{_FOLDER}/alive/{key}", store)
    begun, other, told = time.monotonic(), None, False
    while True:
        data = store.wait(f"{_FOLDER}/found/{key}", _POLL)
        if data is not None:
            _USED.add(key)
            return data
        if listener.is_silent():
            raise RuntimeError(_gone(name, first, listener.who))
        announced = store.under(f"{_FOLDER}/steps/{name}/")
        others = {k.rsplit("/", 1)[-1]: v for k, v in announced.items()}
        if key in others:
            continue
        now = time.monotonic()
        if not told and now - begun > _PATIENCE:
            told = True
            _LOGGER.warning(_late(name, first, now - begun))
        unused = [v for k, v in others.items() if k not in _USED]
        other = (other or now) if unused else None
        if other is not None and now - other > _PATIENCE:
            raise ValueError(_different(name, about, pickle.loads(unused[-1]), first))


# keys of searches that this process has read
_USED: set[str] = set()


def _late(name: str, first: int, seconds: float) -> str:
    """The message for a first process that does not ask for the plan."""
    return (
        f"schedule of {name}: process {jax.process_index()} has waited for "
        f"{seconds:.0f} s for process {first}, which has not begun to search: it is "
        "late, has failed, or never calls this step; process "
        f"{first}'s own output tells which"
    )


def _gone(name: str, first: int, who: str) -> str:
    """The message for a first process that has ended while it searched."""
    return (
        f"schedule of {name}: process {first} ({who}) has begun to search for the plan "
        f"of all processes, and has given no sign of life for {heartbeat.SILENCE:.0f} "
        "s: it has ended, or its host hangs; start the job again"
    )


def _different(name: str, here: About, there: About, first: int) -> str:
    """The message for processes with different steps."""
    names = [*dict.fromkeys((*here, *there))]
    rows = [
        f"\n  {k}: {here.get(k, 'missing')} here, {there.get(k, 'missing')} there"
        for k in names
        if here.get(k) != there.get(k)
    ]
    more = f"\n  ... {len(rows) - _SHOWN} more" if len(rows) > _SHOWN else ""
    return (
        f"schedule of {name}: process {jax.process_index()} has another step than "
        f"process {first}, and the processes of a job must run the same one:"
        + "".join(rows[:_SHOWN])
        + more
    )
