"""Modules to time: of steps compiled on the CPU, and short texts as XLA writes them."""

import json
import subprocess
import sys

import jax

from jaxmem.memory.buffers import parse_hlo


def compiled(fn, *args):
    """The index of a step's module as XLA:CPU compiles it."""
    return parse_hlo(jax.jit(fn).lower(*args).compile().as_text())


def text(entry: str, *computations: str) -> str:
    """A module of an entry computation's lines, and of other computations."""
    lines = "\n".join(f"  {line}" for line in entry.strip().splitlines())
    entry_text = f"ENTRY %main (a: f32[]) -> f32[] {{\n{lines}\n}}\n"
    return "\n".join(["HloModule m, is_scheduled=true\n", *computations, entry_text])


def computation(name: str, body: str) -> str:
    """A computation of a module's text."""
    lines = "\n".join(f"  {line.strip()}" for line in body.strip().splitlines())
    return f"%{name} (p: f32[]) -> f32[] {{\n{lines}\n}}\n"


def printed(program: str):
    """The JSON that a program prints at last, in a process of its own.

    There the checker of types does not slow each call down.
    """
    command = [sys.executable, "-c", program]
    said = subprocess.run(command, capture_output=True, text=True, check=True)
    return json.loads(said.stdout.splitlines()[-1])
