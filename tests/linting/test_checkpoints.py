"""Policies, checkpoints round too much, and recomputation that the compiler undid."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

import jaxmem
from jaxmem.linting.rules.recomputation import products_of_program
from jaxmem.memory import targets

SDS = jax.ShapeDtypeStruct
POLICIES = jax.checkpoint_policies
LAYERS, BATCH, WIDTH = 4, 64, 32
WEIGHTS = SDS((LAYERS, WIDTH, WIDTH), jnp.float32)
X = SDS((BATCH, WIDTH), jnp.float32)
ACTIVATION = BATCH * WIDTH * 4
AVAILABLE = {t.name for t in targets() if t.available}


def layer(x, w):
    """`product` is read by the backward pass, `out` is not."""
    product = checkpoint_name(x @ w, "product")
    return checkpoint_name(jnp.sin(product), "out")


def scanned(layer):
    """The gradient of a loss over layers in a scan."""

    def loss(weights, x):
        step = lambda x, w: (layer(x, w), None)
        return jnp.sum(jax.lax.scan(step, x, weights)[0] ** 2)

    return jax.grad(loss)


def unrolled(layer):
    def loss(weights, x):
        for i in range(LAYERS):
            x = layer(x, weights[i])
        return jnp.sum(x**2)

    return jax.grad(loss)


def under(policy, stack=scanned, **options):
    return stack(jax.checkpoint(layer, policy=policy, **options))


def of(check, step, *args, **options):
    return jaxmem.lint(step, *(args or (WEIGHTS, X)), **options).of(check)


@pytest.mark.parametrize(
    ("stack", "names", "unmatched"),
    [
        (scanned, ("product",), set()),
        (unrolled, ("product",), set()),
        (scanned, ("produkt", "product"), {"produkt"}),
        (unrolled, ("produkt", "product"), {"produkt"}),
        (scanned, ("out",), {"out"}),
        (unrolled, ("out",), set()),  # kept all the same: the next layer's input
    ],
)
def test_names_that_match_no_residual(stack, names, unmatched):
    found = of("unmatched name", under(POLICIES.save_only_these_names(*names), stack))
    assert {n for n in names for f in found if repr(n) in f.what} == unmatched
    for f in found:
        assert f.severity == "error" and "test_checkpoints.py" in f.where
        carried = "does not read" if "'out'" in f.what else "no value in the step"
        assert carried in f.what


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_names_to_offload(stack):
    """The program of a well-known report: the name is on a value nobody reads."""
    offload = functools.partial(
        POLICIES.save_and_offload_only_these_names,
        names_which_can_be_saved=[],
        offload_src="device",
        offload_dst="pinned_host",
    )
    wrong, right = (
        of("unmatched name", under(offload(names_which_can_be_offloaded=[name]), stack))
        for name in ("out", "product")
    )
    assert wrong and not right


def test_names_of_a_policy_made_of_two():
    both = POLICIES.save_from_both_policies(
        POLICIES.save_only_these_names("product"),
        POLICIES.save_only_these_names("elsewhere"),
    )
    (found,) = of("unmatched name", under(both))
    assert "'elsewhere'" in found.what


def test_a_name_inside_a_jitted_loss():
    def loss(weights, x):
        policy = POLICIES.save_only_these_names("product")
        return jax.jit(scanned(jax.checkpoint(layer, policy=policy)))(weights, x)

    assert not of("unmatched name", jax.jit(loss))


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_a_checkpoint_without_a_policy(stack):
    found = of("policy None", under(None, stack))
    assert sum(f.count for f in found) == (1 if stack is scanned else LAYERS)
    assert {f.severity for f in found} == {"note"}
    assert not of("policy None", under(POLICIES.nothing_saveable, stack))


def test_a_policy_that_forgets_its_names():
    if POLICIES.save_anything_except_these_names("x")(None):
        (found,) = of(
            "policy saves all", under(POLICIES.save_anything_except_these_names("out"))
        )
        # of a layer the sine's derivative and its input, and what the loss squares
        assert found.bytes == (2 * LAYERS + 1) * ACTIVATION
        assert jax.__version__ in found.what
    for policy in (
        POLICIES.everything_saveable,
        POLICIES.save_any_names_but_these("out"),
        lambda *_, **__: True,
    ):
        assert not of("policy saves all", under(policy))


@pytest.mark.parametrize("stack", [scanned, unrolled])
def test_a_checkpoint_round_the_whole_loss(stack):
    def step(weights, x):
        loss = lambda w: jnp.sum(stack_of(w, x) ** 2)
        return jax.grad(jax.checkpoint(loss))(weights)

    def stack_of(weights, x):
        if stack is scanned:
            return jax.lax.scan(lambda x, w: (layer(x, w), None), x, weights)[0]
        for i in range(LAYERS):
            x = layer(x, weights[i])
        return x

    (found,) = of("whole loss", step)
    # it holds at least a cosine and an input of each layer
    assert found.bytes >= 2 * (LAYERS - 1) * ACTIVATION
    assert not of("whole loss", under(None, stack))


def test_a_checkpoint_round_each_micro_batch():
    def step(weights, xs):
        def one(total, x):
            loss = lambda w: jnp.sum(jnp.sin(jnp.sin(x @ w[0]) @ w[1]))
            return total + jax.grad(jax.checkpoint(loss))(weights), None

        return jax.lax.scan(one, jnp.zeros_like(weights), xs)[0]

    assert of("whole loss", step, WEIGHTS, SDS((3, BATCH, WIDTH), jnp.float32))


def test_recomputation_undone():
    """Without barriers it is, in unrolled layers; a scan needs none."""
    merged = under(None, unrolled, prevent_cse=False)
    (found,) = of("recomputation undone", merged, target="cpu")
    assert f"of {LAYERS} products" in found.what and "XLA:CPU" in found.remedy
    # of a layer, its cosine at least
    assert found.bytes >= (LAYERS - 1) * ACTIVATION
    assert not of("recomputation undone", under(None, scanned), target="cpu")
    assert not of("recomputation undone", unrolled(layer), target="cpu")


@pytest.mark.slow
@pytest.mark.skipif("h100" not in AVAILABLE, reason="targets extra")
def test_recomputation_on_a_gpu_is_undone_without_barriers_alone():
    args = SDS((LAYERS, 512, 512), jnp.float32), SDS((1024, 512), jnp.float32)
    for prevent_cse in (True, False):
        step = under(None, unrolled, prevent_cse=prevent_cse)
        found = of("recomputation undone", step, *args, target="h100")
        assert bool(found) == (not prevent_cse)


def test_products_are_counted_by_pass():
    text = """
      %a = f32[2]{0} dot(%x, %y), metadata={op_name="jit(f)/jvp()/dot_general"}
      %b = f32[2]{0} dot(%x, %y), metadata={op_name="jit(f)/transpose(jvp())/dot"}
      %c = (f32[2]{0}) custom-call(%x), custom_call_target="__cublas$gemm", metadata={
      op_name="jit(f)/jvp()/dot_general"}
      %d = f32[2]{0} convolution(%x), metadata={op_name="a/rematted_computation/b"}
      %e = f32[2]{0} add(%x, %y), metadata={op_name="jit(f)/dot_general"}
    """
    assert products_of_program(text) == (1, 2)
