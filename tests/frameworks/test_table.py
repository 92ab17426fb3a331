"""Every public function that takes a step, on every form of it.

What wraps a step must train as it does, to the last bit: no layer is scanned here, so
nothing is done in another order. What only looks at a step must leave it as it was.
"""

import functools
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from typer.testing import CliRunner

import jaxmem
from jaxmem.cli import app
from jaxmem.scheduling import predict
from tests.frameworks.forms import FORMS, LINEN_STATE, MAIN, NNX, TX, X, losses
from tests.frameworks.stacks import stack_args, step
from tests.sets import slow_unless

pytestmark = [
    pytest.mark.usefixtures("standard_promotion"),
    pytest.mark.filterwarnings("ignore:no argument is donated"),
]

STATE_BYTES = 3 * 2 * 8 * 8 * 4  # two kernels of 8 x 8 and their moments


@functools.cache
def wanted(form):
    """The losses of the step as its framework compiles it."""
    return losses(form.jitted, form)


def over_forms(table: dict, fast: dict[str, tuple[str, ...]]):
    """All pairs; what compiles is slow on forms other than these."""
    pairs = product(table.items(), FORMS.items())
    return pytest.mark.parametrize(
        "function, form",
        [
            pytest.param(
                function,
                form,
                id=f"{name}-{kind}",
                marks=slow_unless(kind in fast.get(name, FORMS)),
            )
            for (name, function), (kind, form) in pairs
        ],
    )


WRAPPERS = {
    "schedule": lambda form: jaxmem.schedule(form.step),
    "donating": lambda form: jaxmem.schedule(form.step, donate_argnums=(0,)),
    "in a function": lambda form: jaxmem.schedule(lambda *args: form.step(*args)),
    "schedule of schedule": lambda form: jaxmem.schedule(jaxmem.schedule(form.step)),
    "for a target": lambda form: jaxmem.schedule(form.step, target="cpu"),
    "in a budget": lambda form: jaxmem.schedule(form.step, "1MiB", target="cpu"),
}


# Both search, and one takes what the other takes.
SEARCHES = {
    "for a target": ("nnx", "equinox.filter_jit"),
    "in a budget": ("plain", "linen", "nnx.jit"),
}


@over_forms(WRAPPERS, dict.fromkeys({*WRAPPERS} - {"schedule"}, MAIN) | SEARCHES)
def test_the_loss_falls_as_in_the_plain_step(function, form):
    want = wanted(form)
    assert want[2] < want[1] < want[0]
    assert losses(function(form), form) == want


LOOKS = {
    "estimate": lambda form, args: jaxmem.estimate(form.step, *args),
    "estimate scheduled": lambda form, args: jaxmem.estimate(
        jaxmem.schedule(form.step), *args
    ),
    "max_batch": lambda form, args: jaxmem.max_batch(
        form.step,
        lambda n: (*args[:-1], jax.ShapeDtypeStruct((n, 8), jnp.float32)),
        memory="24KiB",
        limit=2,
    ),
    "lint": lambda form, args: jaxmem.lint(form.step, *args),
    "advise": lambda form, args: jaxmem.advise(form.step, *args, budget="1GiB"),
    "predict": lambda form, args: predict(form.step, *args),
    "plan": lambda form, args: jaxmem.schedule(form.step).plan(*args),
    "lower": lambda form, args: jaxmem.schedule(form.step).lower(*args),
    "eval_shape": lambda form, args: jaxmem.schedule(form.step).eval_shape(*args),
}


COMPILES = dict.fromkeys(("estimate", "estimate scheduled", "advise"), MAIN)


@over_forms(LOOKS, COMPILES | {"max_batch": ("linen", "nnx.jit")})
def test_looking_at_a_step_changes_nothing(function, form):
    args = form.make()
    assert function(form, args) is not None
    assert losses(form.jitted, form._replace(make=lambda: args)) == wanted(form)


@over_forms({"bytes": None}, {"bytes": ("linen", "nnx.jit", "equinox.filter_jit")})
def test_all_see_the_same_step(function, form):
    """Bytes of the state go in and out, whatever holds them."""
    args = form.make()
    places = tuple(range(len(args) - 1))
    report = jaxmem.estimate(form.step, *args, donate_argnums=places)
    assert report.output_bytes >= report.alias_bytes >= STATE_BYTES
    seen = predict(form.step, *args, donate_argnums=places)
    assert seen.argument_bytes == report.argument_bytes
    assert seen.output_bytes == 4  # all but the loss lies in donated arguments
    plan = jaxmem.schedule(form.step, donate_argnums=places).plan(*args, target="cpu")
    assert plan.scheduled.alias_bytes == plan.plain.alias_bytes == report.alias_bytes


@pytest.mark.parametrize("form", [FORMS[kind] for kind in MAIN], ids=MAIN)
def test_residuals(form):
    """Of the loss: what the model's object is does not matter."""
    model = form.make()[0]
    model = model.params if form is LINEN_STATE else model
    found = jaxmem.residuals(form.loss, model, X)
    assert found.total_bytes >= 2 * X.nbytes  # each layer's tanh


@pytest.mark.fast(
    "1-plain",
    "2-plain",
    "2-linen",
    "2-nnx",
    "2-nnx.jit",
    "2-equinox.filter_jit",
)
@pytest.mark.parametrize("form", [FORMS[kind] for kind in MAIN], ids=MAIN)
@pytest.mark.parametrize("n", [1, 2])
def test_microbatch(n, form):
    """The same optimizer, on as many micro-batches: gradients are averaged."""
    args, found = form.make(), []
    tx = args[1].tx if form.make is NNX.make else TX
    tx = args[0].tx if form is LINEN_STATE else tx
    step = jaxmem.microbatch(form.loss, tx, n)
    for _ in range(3):
        out = step(*args)
        if isinstance(out, dict):  # objects, updated in place
            out = (out,)
        args = (*out[:-1], *args[len(out) - 1 :])
        found.append(float(out[-1]["loss"]))
    # a mean of means, of some ten float32 sums, through Adam's division
    assert found == pytest.approx(wanted(form), rel=1e-5)


def test_inside_of_jit():
    """The step of another jitted function, which carries the objects."""
    scheduled = jaxmem.schedule(NNX.step)
    outer = nnx.jit(lambda *args: scheduled(*args))
    assert losses(outer, NNX) == wanted(NNX)


def test_remat_policy_of_an_nnx_step():
    """Names inside of scanned nnx layers are found."""
    policy = jaxmem.remat_policy(
        step, "1GiB", *stack_args(), target="cpu", donate_argnums=(0, 1)
    )
    assert policy.names == ("up",)
    assert policy.report.alias_bytes > 0


def test_the_command_line_takes_objects(tmp_path):
    file = tmp_path / "train.py"
    file.write_text(
        "from tests.frameworks.forms import NNX_JIT, nnx_args\n"
        "def for_jaxmem():\n"
        "    return NNX_JIT, nnx_args(), {'donate_argnums': (0, 1)}\n"
    )
    out = tmp_path / "report.json"
    result = CliRunner().invoke(app, ["estimate", f"{file}:for_jaxmem", "--json", out])
    assert result.exit_code == 0, result.output
    report = jaxmem.memory.MemoryReport.from_json(out.read_text())
    assert report.alias_bytes >= STATE_BYTES
