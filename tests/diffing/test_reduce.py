"""What is left is what shows the growth, and it runs by itself."""

import re
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem.diffing._program import Program
from jaxmem.diffing._reduce import ProgramPair, reduced
from tests.diffing.steps import plain, remat

X = np.ones((4, 4), np.float32)


def _program(fn):
    return Program.of_step(fn, (X,), {})


def _wide(x):
    """Of many operations one that a compiler is told to be bad at."""
    y = jnp.cos(jnp.sin(x) @ jnp.tanh(x))
    return jnp.exp(jnp.cumsum(y, 0)) - y, jnp.sum(jnp.log1p(jnp.abs(x)) * y)


def test_one_program_is_reduced_to_the_guilty_operation():
    program = _program(_wide)
    sizes = lambda texts: (10, 10 + 1000 * ("cumsum" in texts[1]))
    found = reduced(ProgramPair(program, program), sizes, 60)
    assert [e[0] for e in found.pair.after.equations] == ["cumsum"]
    assert found.pair.before is found.pair.after and found.finished
    assert (found.before, found.after) == (10, 1010)


def test_half_of_the_growth_is_enough_and_less_is_not():
    program = _program(_wide)
    names = "cumsum", "tanh", "sin(", "log1p"
    sizes = lambda texts: (0, 100 * sum(name in texts[1] for name in names))
    found = reduced(ProgramPair(program, program), sizes, 60)
    assert found.after == 200


def test_what_the_first_has_alone_may_not_be_what_grows():
    """A first program that is made smaller would be a growth by itself."""
    before, after = _program(lambda x: jnp.sin(jnp.cos(x))), _program(jnp.sin)
    weight = lambda text: 100 * ("cos" in text) + 150 * ("sin(" in text)
    sizes = lambda texts: (weight(texts[0]), 150 + weight(texts[1]))
    found = reduced(ProgramPair(before, after), sizes, 60)
    assert found.after - found.before <= 50
    assert any(e[0] == "cos" for e in found.pair.before.equations)


def test_nothing_that_grows():
    program = _program(_wide)
    with pytest.raises(ValueError, match="7 bytes of temporaries before and 7 after"):
        reduced(ProgramPair(program, program), lambda texts: (7, 7), 60)


def test_the_time_ends_a_search():
    program = _program(_wide)
    found = reduced(ProgramPair(program, program), lambda texts: (0, 1), 1e-9)
    assert not found.finished and found.pair.after is program


@pytest.mark.slow
def test_a_growth_is_a_short_script_of_plain_jax(tmp_path):
    file = tmp_path / "growth.py"
    found = jaxmem.diff(remat(), plain(), reduce=file)
    growth = found.reports[1].temp_bytes - found.reports[0].temp_bytes
    text = file.read_text()
    assert "jaxmem" not in text and len(text.splitlines()) < 60
    assert f"{len(text.splitlines())} lines of plain JAX" in found.notes[0]
    run = [sys.executable, file]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    sizes = dict(re.findall(r"(\w+): (\d+)", done.stdout))
    assert int(sizes["after"]) - int(sizes["before"]) >= growth / 2
