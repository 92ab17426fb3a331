"""Public functions called with what they do not take.

Each error is ours, at the call: it names the argument, shows the value (of an array its
shape) and says what is allowed. Nothing is compiled. The rows are in `tests/bad_calls`.
"""

import importlib
import pathlib
import re
import traceback

import jax
import pytest

import jaxmem
from jaxmem._checks import shown
from tests.bad_calls import CALLS

PACKAGE = pathlib.Path(jaxmem.__file__).parent
OURS = (str(PACKAGE), str(PACKAGE.parent / "pallas_kernels"))


ROWS = [
    pytest.param(call, name, values, id=f"{call.name}-{name}")
    for call in CALLS
    for name, values in call.bad.items()
]


def test_there_are_enough():
    assert sum(len(values) for call in CALLS for values in call.bad.values()) >= 200


@pytest.mark.parametrize("call,name,values", ROWS)
def test_is_refused_by_name(call, name, values, untyped):
    problems = [(shown(v), why) for v in values if (why := _problem(call, name, v))]
    assert not problems


def _problem(call, name, value) -> str:
    """What is wrong with the error that this value gets; empty if nothing is."""
    try:
        call.run(**{name: value})
    except (TypeError, ValueError, KeyError) as error:
        text = str(error)
        raised_by = traceback.extract_tb(error.__traceback__)[-1].filename
    except Exception as error:
        return f"a {type(error).__name__}: {error}"
    else:
        return "accepted"
    if not raised_by.startswith(OURS):
        return f"raised in {raised_by}: {text}"
    if name not in text:
        return f"does not name the argument: {text}"
    seen = [shown(value), *([str(value.shape)] if hasattr(value, "shape") else [])]
    if isinstance(value, dict | list | tuple):  # a part of it will do
        leaves = jax.tree.leaves(value, is_leaf=lambda x: x is None)
        seen += [shown(x) for x in leaves]
        seen += [str(x.shape) for x in leaves if hasattr(x, "shape")]
        seen += map(repr, value)  # keys
    seen = [s for s in seen if s in text]
    if not seen:
        return f"does not show the value: {text}"
    if len(text) < len(name) + min(map(len, seen)) + len("=: an int"):
        return f"does not say what is allowed: {text}"
    return ""


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.name)
def test_the_call_itself_is_a_good_one(call, untyped):
    """Else a row could be refused for something that is wrong in all of them."""
    call.check()


# What takes anything, takes nothing, or is what a function returns.
WITHOUT_ARGUMENTS_OF_ITS_OWN = """
    AdamAState Advice ApolloState AuditFinding AuditReport FiraState GaLoreState
    GaLoreSumState BudgetError
    CheckReport Choice CompiledMeasure Finding Frontier Frozen Gradient KeptArrays
    LeafDifference StepComparison VerifyError compared drawn verify
    Layout Lifetimes LintReport MemoryReport MicrobatchStep NoLayoutError
    Normalized Operation Operations Order OutOfReach Plan Prediction RematPolicy
    RecomputedOperation RecomputedResidual Rematerialised Replacement Report Residual
    RemainingArrays ReportComparison Residuals RowwiseAdagradState RuntimeMemory
    SaveChoice Scheduled Site
    SplitParameters Stored SubstitutionReport Target TrainedSizes Trial accumulates
    TiledRegion swish targets
""".split()
# What the other packages compile with; `estimate` checks the arguments.
WITHOUT_ARGUMENTS_OF_ITS_OWN += (
    "Ledger LedgerRow MomentCodes CompileError DoesNotFit Pending begin".split()
    + ["start_worker"]
)
# What the packages ask each other to find the largest batch, and what to advise.
WITHOUT_ARGUMENTS_OF_ITS_OWN += (
    "BatchSearch BatchSize KeptInside OperationTime Remedy StepTime advice_on"
    " kept_inside remedies_for with_losses".split()
)
# States, which `init` makes
WITHOUT_ARGUMENTS_OF_ITS_OWN += (
    "AdamMiniState CameState FactoredRmsState FactoredMoment MuonState Sm3State".split()
    + "LionState RmsState ScheduleFreeState ShampooState SoapState".split()
)
# What the search and the benchmarks ask of an audit that is made already
WITHOUT_ARGUMENTS_OF_ITS_OWN += "audit_texts findings_of".split()
# What `choose_codes` returns
WITHOUT_ARGUMENTS_OF_ITS_OWN += "ChosenCodes LeafCode".split()
# What `sweep` returns
WITHOUT_ARGUMENTS_OF_ITS_OWN += "Sweep SweptStep".split()
# What the command asks of `diff`
WITHOUT_ARGUMENTS_OF_ITS_OWN += (
    "Side StepHere check_limits compare_sides elsewhere exceeded saved".split()
)
# What `explain` returns, and what its command asks first
WITHOUT_ARGUMENTS_OF_ITS_OWN += "Explanation LargeBuffer LineToWrite has_error".split()
# What `live_arrays` and `monitor` return, and what the monitor asks of `memory`
WITHOUT_ARGUMENTS_OF_ITS_OWN += (
    "LiveArray LiveArrays LiveArraysChange Monitor fragmentation".split()
)
# Flax's own arguments alone
AS_IN_FLAX = {"linen.BatchNorm", "linen.Dropout", "linen.GroupNorm"}
AS_IN_FLAX |= {name.replace("linen", "nnx") for name in AS_IN_FLAX}
AS_IN_FLAX |= {"nnx.NormCache"}


def _public():
    for part in (*jaxmem._SUBPACKAGES, "nn.linen", "nn.nnx"):
        module = importlib.import_module(f"jaxmem.{part}")
        for name, value in vars(module).items():
            ours = str(getattr(value, "__module__", "")).startswith("jaxmem")
            if part != "demo" and ours and callable(value) and name[0] != "_":
                if part not in ("nn.linen", "nn.nnx"):
                    yield name
                elif isinstance(value, type):
                    yield f"{part.removeprefix('nn.')}.{name}"


def test_no_public_function_is_left_out():
    exempt = {*WITHOUT_ARGUMENTS_OF_ITS_OWN} | AS_IN_FLAX
    called = {re.sub(r"[ +].*", "", call.name) for call in CALLS}
    assert set(_public()) - called == exempt
