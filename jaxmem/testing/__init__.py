"""Assertions for test suites, and a pytest plugin: the fixture `memory_baseline`."""

from jaxmem.testing._memory import assert_memory as assert_memory

__all__ = ["assert_memory"]
