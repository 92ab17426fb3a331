"""What an installed jaxmem must do, tried from a folder without its sources.

python smoke.py    # with the interpreter that has jaxmem installed
"""

import importlib.metadata
import pathlib
import subprocess
import sys
import sysconfig

import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxmem
import pallas_kernels


def check_installed_files() -> None:
    """Both packages come from the environment, and say that they are typed."""
    environment = pathlib.Path(sysconfig.get_path("purelib")).resolve()
    for package in (jaxmem, pallas_kernels):
        folder = pathlib.Path(package.__file__).resolve().parent
        assert folder.parent == environment, f"{package.__name__} is that of {folder}"
    assert (pathlib.Path(jaxmem.__file__).parent / "py.typed").exists()


def check_command() -> None:
    command = pathlib.Path(sysconfig.get_path("scripts")) / "jaxmem"
    run = [str(command), "--version"]
    printed = subprocess.run(run, capture_output=True, text=True, check=True).stdout
    version = importlib.metadata.version("jaxmem")
    assert jaxmem.__version__ == version and version in printed, printed


def check_schedule() -> None:
    """A scheduled step over two scanned layers gives what the plain step gives."""
    adam = optax.adam(1e-2)

    def loss(params, x):
        x, _ = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params)
        return (x**2).mean()

    def step(state, x):
        params, moments = state
        value, grads = jax.value_and_grad(loss)(params, x)
        updates, moments = adam.update(grads, moments, params)
        return (optax.apply_updates(params, updates), moments), value

    params = jax.random.normal(jax.random.key(0), (2, 8, 8))
    x = jax.random.normal(jax.random.key(1), (4, 8))
    expected = jax.jit(step)((params, adam.init(params)), x)
    scheduled = jaxmem.schedule(step)((params, adam.init(params)), x)
    # a few dozen float32 operations in another order, each within 2**-24
    close = lambda a, b: np.testing.assert_allclose(a, b, 1e-5)
    jax.tree.map(close, scheduled, expected)
    report = jaxmem.estimate(step, (params, adam.init(params)), x, target="cpu")
    assert report.peak_bytes >= 3 * params.nbytes


def main() -> None:
    check_installed_files()
    check_command()
    check_schedule()
    print(
        f"jaxmem {jaxmem.__version__} works on Python {sys.version.split()[0]}", end=""
    )
    print(f" and jax {jax.__version__}")


if __name__ == "__main__":
    main()
