"""The pytest plugin: the fixture `memory_baseline`, and the option to update it.

It is loaded in every run of pytest where jaxmem is installed, and imports nothing of
jax before the fixture is called.
"""

import re
from collections.abc import Callable
from typing import Any

import pytest

from jaxmem.testing._memory import assert_memory

_FOLDER = "memory_baselines"  # beside the test


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--update-memory-baselines`."""
    parser.getgroup("jaxmem").addoption(
        "--update-memory-baselines",
        action="store_true",
        help="Write the baselines of memory_baseline instead of comparing with them.",
    )


@pytest.fixture
def memory_baseline(request: pytest.FixtureRequest) -> Callable[..., Any]:
    """`jaxmem.testing.assert_memory` with a baseline of the test's own.

    `memory_baseline(step, *args, target="h100", max_bytes="14GiB", max_ms=60)` compiles
    the step, compares it with the limits and with the report in the folder
    `memory_baselines` beside the test, and returns the `MemoryReport`. `pytest
    --update-memory-baselines` writes these reports. A test that has several steps gives
    each a `name`.
    """
    update = bool(request.config.getoption("--update-memory-baselines"))

    def check(step: Callable, *args: Any, name: str = "", **limits: Any) -> Any:
        parts = filter(None, (request.path.stem, request.node.name, name))
        file = re.sub(r"[^\w.=-]+", "_", ".".join(parts)).strip("_")
        path = request.path.parent / _FOLDER / f"{file}.json"
        return assert_memory(step, *args, baseline=path, update=update, **limits)

    return check
