"""A framework of some thirty lines, registered by one call, in whatever takes a step.

Its modules are objects that JAX does not look into: no pytrees, and not updated in
place. `CONTRIBUTING.md` has the same lines.
"""

import pathlib
import re
import subprocess
import sys
import textwrap
from types import SimpleNamespace
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxmem
from jaxmem import frameworks, nn
from jaxmem.frameworks import registry
from tests.frameworks.forms import EQX, TX, D, X, mean_square, plain_args

pytestmark = pytest.mark.usefixtures("standard_promotion")

CONTRIBUTING = pathlib.Path(__file__).parents[2] / "CONTRIBUTING.md"


def example() -> str:
    """The file of a framework that the guide shows."""
    text = CONTRIBUTING.read_text().partition("**A framework**")[2]
    return text.partition("```python\n")[2].partition("```")[0]


class Toy:
    """A model of the toy framework: named arrays, parts, and a function of a module."""

    def __init__(self, call, **members):
        self.call, self.members = call, members

    def __call__(self, x):
        return self.call(self, x)


@pytest.fixture(scope="module")
def toy():
    module = type(sys)("toy")
    vars(module)["Module"] = Toy
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "toy", module)
        names: dict[str, Any] = {}
        exec(compile(example(), "toy_framework.py", "exec"), names)  # noqa: S102
        framework = names["TOY"]
        frameworks.register(framework)
        yield framework
        frameworks.unregister(framework)


def layer(self, x):
    return x + jnp.tanh(x @ self.members["kernel"])


def net(self, x):
    return self.members["last"](self.members["first"](x))


def model():
    kernels, _, _ = plain_args()
    layers = [Toy(layer, kernel=kernel) for kernel in kernels]
    return Toy(net, first=layers[0], last=layers[1])


def loss_fn(model, x, rng=None):
    return mean_square(model(x))


def step_of(framework):
    def step(model, state, x):
        return framework.train_step(loss_fn, TX, model, state, (x,))

    return step


def args_of(framework):
    start = model()
    return start, TX.init(framework.parameters(start)), X


def values(framework, tree):
    return [np.asarray(x) for x in framework.split(tree).arrays]


def losses(run, framework, steps=3):
    args, found = args_of(framework), []
    for _ in range(steps):
        new, state, loss = run(*args)
        args = new, state, X
        found.append(float(loss))
    return found


def test_the_example_is_short():
    lines = [x for x in example().splitlines() if x.strip()]
    assert 25 <= len(lines) <= 45


def test_schedule_trains_it(toy):
    step = step_of(toy)
    got = losses(jaxmem.schedule(step, donate_argnums=(0, 1)), toy)
    plain_model, state, _ = args_of(toy)
    want = []
    for _ in range(3):
        plain_model, state, loss = jax.disable_jit()(step)(plain_model, state, X)
        want.append(float(loss))
    # each a sum of some hundred float32 numbers, in another order
    assert got == pytest.approx(want, rel=1e-5)
    assert got[2] < got[1] < got[0]


def test_estimate_counts_its_arrays_and_names_them(toy):
    report = jaxmem.estimate(step_of(toy), *args_of(toy), donate_argnums=(0, 1))
    assert report.alias_bytes >= 3 * 2 * D * D * 4  # two kernels and their moments
    assert any("model.first.kernel" in row.name for row in report.at_peak)


def test_a_ledger_of_it(toy):
    found = jaxmem.ledger(model(), TX)
    assert found.parameters == 2 * D * D


@pytest.mark.parametrize("n", [1, 2])
def test_microbatch(toy, n):
    step = jaxmem.microbatch(loss_fn, TX, n)
    args, found = args_of(toy)[:2], []
    for _ in range(3):
        *args, metrics = step(*args, X)
        found.append(float(metrics["loss"]))
    # a mean of means, of some ten float32 sums, through Adam's division
    assert found == pytest.approx(losses(step_of(toy), toy), rel=1e-5)
    assert isinstance(args[0], Toy)


def test_freezing(toy):
    params, frozen = jaxmem.trainable(model(), "last")
    loss, grads = jaxmem.value_and_grad(loss_fn)(params, frozen, X)
    assert float(loss) == pytest.approx(float(loss_fn(model(), X)), rel=1e-6)
    (grad,) = jax.tree.leaves(grads)
    assert np.abs(grad).max() > 0
    whole = frozen.merge(jax.tree.map(jnp.zeros_like, params))
    first, last = values(toy, whole)
    np.testing.assert_array_equal(first, values(toy, model())[0])
    np.testing.assert_array_equal(last, 0)
    with pytest.raises(ValueError, match="'nowhere'"):
        jaxmem.trainable(model(), "nowhere")
    with pytest.raises(TypeError, match="path patterns or an toy filter"):
        jaxmem.trainable(model(), 3)


def test_substitute_exchanges_by_rules_and_replaces_formulas(toy):
    with_gelu = Toy(
        lambda self, x: jax.nn.gelu(self.members["inner"](x)), inner=model()
    )
    lean = jaxmem.substitute(with_gelu)
    np.testing.assert_allclose(lean(X), with_gelu(X), rtol=1e-6)
    assert nn.report(lean).replaced() == 1
    rule = nn.Rule("inner/last", lambda module: lambda x: 2 * module(x))
    lean = jaxmem.substitute(with_gelu, rules=[rule])
    inner = Toy(lambda self, x: 2 * net(self, x), **model().members)
    want = jax.nn.gelu(inner(X))
    np.testing.assert_allclose(lean(X), want, rtol=1e-6)
    found = nn.report(lean)
    assert [entry.path for entry in found.modules] == ["inner/last"]
    assert not found.unused_rules


def test_equinox_modules_by_rules():
    model = EQX.make()[0]
    rule = nn.Rule(eqx.nn.Linear, lambda module: lambda x: 0 * x)
    lean = jaxmem.substitute(model, rules=[rule])
    np.testing.assert_array_equal(lean(X), X)  # the residual stream alone
    paths = [entry.path for entry in nn.report(lean).modules]
    assert paths == ["layers/0", "layers/1"]
    left = jaxmem.substitute(model, rules=[nn.Rule("layers", None)])
    with pytest.warns(UserWarning, match="nothing to replace"):
        np.testing.assert_allclose(left(X), model(X), rtol=1e-6)
    assert all(entry.replaced_by is None for entry in nn.report(left).modules)


class Transformed(NamedTuple):
    """As Haiku has it."""

    init: Any
    apply: Any


def test_haiku_by_its_apply(monkeypatch):
    haiku = SimpleNamespace(Transformed=Transformed, TransformedWithState=Transformed)
    monkeypatch.setitem(sys.modules, "haiku", haiku)
    plain = Transformed(lambda rng, x: {"w": X}, lambda p, rng, x: jax.nn.gelu(p["w"]))
    lean = jaxmem.substitute(plain)
    assert isinstance(lean, Transformed) and lean.init is plain.init
    params = plain.init(None, X)
    want = plain.apply(params, None, X)
    np.testing.assert_allclose(lean.apply(params, None, X), want, rtol=1e-6)
    assert nn.report(lean, params, None, X).replaced() == 1


def test_check_and_advise_copy_it(toy):
    step = step_of(toy)
    report = jaxmem.check(
        jaxmem.schedule(step, donate_argnums=(0, 1)), step, *args_of(toy), steps=2
    )
    assert report.passed and report.carried
    advice = jaxmem.advise(loss_fn, model(), X, tx=TX, budget="1GiB")
    assert advice is not None


def test_registration_is_by_name(toy):
    count = len(registry.in_use())
    frameworks.register(toy)
    assert len(registry.in_use()) == count
    assert frameworks.framework_of(model()) is toy
    assert frameworks.framework_of({"w": X}).name == "plain"


def test_no_framework_is_imported_to_find_out():
    code = """
        import sys
        import jax.numpy as jnp
        from jaxmem import frameworks
        step = lambda params, x: (params * x).sum()
        args = jnp.ones(3), jnp.ones(3)
        with frameworks.pure_call(step, args, {}) as call:
            assert call.form.as_it_is
        assert frameworks.framework_of(args[0]).name == "plain"
        frameworks.has_models(args), frameworks.map_arrays(jnp.copy, args)
        print({"equinox", "haiku", "flax", "flax.nnx"} & set(sys.modules))
    """
    run = [sys.executable, "-c", textwrap.dedent(code)]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_only_its_file_and_its_line_know_a_framework():
    """Beside the lean layers of `jaxmem.nn`, and texts for users."""
    package = pathlib.Path(jaxmem.__file__).parent
    known = re.compile(
        r"^\s*(from|import) (flax|equinox|haiku)\b|modules.*(flax|equinox|haiku)\b",
        re.MULTILINE,
    )
    files = {
        str(path.relative_to(package))
        for path in package.rglob("*.py")
        if known.search(path.read_text())
        and path.relative_to(package).parts[0] not in ("nn", "demo")
    }
    assert files == {
        "advising/errors.py",  # measures the error of lean layers on a model of them
        "frameworks/equinox.py",
        "frameworks/haiku.py",
        "frameworks/linen.py",
        "frameworks/nnx.py",
    }
