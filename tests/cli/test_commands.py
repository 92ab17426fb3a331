"""Every command, and every one of its exit codes: 0, 1, 2 and 3."""

import importlib.util
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import jax
import pytest
import typer

import jaxmem
from benchmarks.layout import guillotine
from jaxmem import chips
from jaxmem.auditing import AuditFinding, AuditReport
from jaxmem.cli import app
from jaxmem.memory import DoesNotFit
from jaxmem.planning import write_buffers
from jaxmem.scheduling import BudgetError
from tests.cli.invoking import invoke

GIB = 2**30
COMMANDS = [
    *"estimate residuals max-batch sweep plan advise lint audit check diff".split(),
    *"explain ledger targets demo layout".split(),
]
OUT_OF_MEMORY = "Ran out of memory in memory space hbm. Used 20.1G of 15.75G hbm."
BUFFERS = "id,lower,upper,size\n0,0,2,64\n1,1,3,32\n"


@pytest.fixture(autouse=True)
def doubles(monkeypatch, tmp_path):
    """A batch takes a GiB each in the place of a compile, and a demo nothing."""
    sized = lambda fn, *args, **how: SimpleNamespace(
        peak_bytes=args[-1].shape[0] * GIB, seconds=None
    )
    monkeypatch.setattr("jaxmem.memory._max_batch.estimate", sized)

    def swept(fn, *args, **how):
        if args[-1].shape[0] > 64:
            raise DoesNotFit("too large")
        return sized(fn, *args)

    monkeypatch.setattr("jaxmem.memory.sweeps.combinations.estimate", swept)
    done = SimpleNamespace(to_json=lambda: {"loss_gap": 0.0})
    monkeypatch.setattr("jaxmem.demo.run", lambda *args: done)
    # whatever is installed here: nothing is there, and nothing can be downloaded
    monkeypatch.setattr("jaxmem.chips._compilers.version_of", lambda package: None)
    monkeypatch.setenv("JAXMEM_TARGETS_DIR", str(tmp_path / "targets"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    chips._compilers.forget_compilers()
    yield
    chips._compilers.forget_compilers()


def test_commands_stand_in_the_order_of_use():
    assert [c.name for c in app.registered_commands] == COMMANDS
    result = invoke("--help")
    assert result.exit_code == 0
    places = [result.stdout.index(f" {name} ") for name in COMMANDS]
    assert places == sorted(places)


# a command, its exit code, and words of what it prints
CASES = [
    ("estimate user_steps:gradient", 0, "peak"),
    ("estimate user_steps:gradient --max 1GiB", 0, "within --max: the peak takes"),
    ("estimate user_steps:gradient --max 1KiB", 1, "more than --max: the peak takes"),
    ("estimate user_steps:gradient --max 1parsec", 2, "--max='1parsec'"),
    ("estimate user_steps:gradient --donate 2", 2, "there are 2 arguments"),
    ("estimate user_steps:step --donate weights", 2, "'weights'"),
    ("estimate user_steps:step --static 2", 2, "there are 2 arguments"),
    ("estimate user_steps:step --static weights", 2, "'weights'"),
    ("estimate user_steps:step --static 0 --donate w", 2, "donated and static"),
    ("estimate user_steps:step --args nothing", 2, "no function 'nothing'"),
    ("estimate user_steps:sized_step --batch 0", 2, "--batch"),
    ("estimate user_steps:step --timeout 0", 2, "--timeout"),
    ("estimate user_steps:step --timeout inf", 2, "no number of seconds"),
    ("estimate user_steps:gradient --target h1000", 2, "unknown target 'h1000'"),
    ("estimate user_steps:gradient --target h100", 3, "targets --install gpu"),
    ("estimate user_steps:gradient --target tpu-v5e", 3, "targets --install tpu"),
    ("estimate user_steps:not_traceable", 3, "cannot be traced"),
    ("estimate user_broken:step", 3, "No module named 'no_such_library'"),
    ("advise user_steps:gradient --budget 1GiB", 0, "as it is"),
    ("advise user_steps:gradient --budget 1KiB", 1, "does not fit: no technique that"),
    ("advise user_steps:gradient --budget 0", 2, "more than 0 bytes"),
    ("advise user_steps:gradient --target cpu", 2, "memory of cpu is not known"),
    ("advise user_steps:gradient --target h1000", 2, "unknown target"),
    ("advise user_steps:gradient --args nothing", 2, "no function 'nothing'"),
    ("advise user_steps:sized_step --batch 0", 2, "--batch"),
    ("advise user_steps:step --budget 1GiB --donate weights", 2, "'weights'"),
    ("advise user_steps:step --budget 1GiB --static weights", 2, "'weights'"),
    ("advise user_steps:loss_and_tx --budget 1GiB --donate 0", 2, "takes none"),
    ("advise user_steps:gradient --budget 1GiB --allow few", 2, "bits, moments, adama"),
    ("advise user_steps:gradient --budget 1GiB --allow bits", 3, "give the loss"),
    ("advise user_steps:loss_and_tx --budget 1GiB --allow adama", 0, "as it is"),
    ("advise user_steps:not_traceable --budget 1GiB", 3, "cannot be traced"),
    ("residuals user_steps:loss --argnums 0", 0, "kept for the backward pass"),
    ("residuals user_steps:loss --max 80KiB", 0, "within --max: what is kept"),
    ("residuals user_steps:loss --max 1KiB", 1, "more than --max: what is kept"),
    ("residuals user_steps:loss --max -1", 2, "--max"),
    ("residuals user_steps:loss --args nothing", 2, "no function 'nothing'"),
    ("residuals user_steps:loss --batch 0", 2, "--batch"),
    ("residuals user_steps:loss --argnums 2", 2, "there are 2 arguments"),
    ("residuals user_steps:without_floats", 3, "no floating-point array"),
    ("residuals user_steps:broken", 3, "RuntimeError: no weights to be found"),
    ("sweep user_steps:sized_step --over batch=2,4,128", 0, "4.00 GiB"),
    ("sweep user_steps:sized_step --over batch=128", 1, "none of the steps"),
    ("sweep user_broken:step --over batch=2", 3, "no_such_library"),
    ("sweep user_steps:sized_step --over batch=2 --timeout inf", 2, "no number"),
    ("sweep user_steps:sized_step --over batch=2 --target h1000", 2, "unknown target"),
    ("sweep user_steps:sized_step --over batch", 2, "expected NAME=VALUE"),
    ("sweep user_steps:sized_step --over batch=2 --over batch=4", 2, "given twice"),
    ("sweep user_steps:sized_step --over rows=2", 2, "parameters of `make`"),
    ("sweep user_steps:not_a_function --over batch=2", 2, "int, no function"),
    ("max-batch user_steps:step --args sized --memory 12GiB", 0, "12"),
    ("max-batch user_steps:sized_step --memory 12.5GiB --multiple-of 8", 0, "8"),
    ("max-batch user_steps:sized_step --memory 0.5GiB", 1, "batch on cpu is 0"),
    ("max-batch user_steps:sized_step --memory 12GiB --limit 8", 0, "8 is the limit"),
    ("max-batch user_steps:sized_step --memory 12GiB --min 16", 1, "is 12"),
    ("max-batch user_steps:sized_step", 2, "memory of cpu is not known"),
    ("max-batch user_steps:plain --memory 1GiB", 2, "no parameter named 'batch'"),
    ("max-batch user_steps:sized_step --memory 1GiB --limit 1 --multiple-of 2", 2, ""),
    ("max-batch user_steps:sized_step --memory 1parsec", 2, "--memory"),
    ("max-batch user_steps:sized_step --memory 1GiB --min 3 --limit 2", 2, "--min 3"),
    ("max-batch user_steps:sized_step --memory 1GiB --multiple-of 0", 2, "--multiple"),
    ("max-batch user_steps:sized_step --target h1000", 2, "unknown target"),
    ("max-batch user_steps:step --memory 1GiB --args nothing", 2, "no function"),
    ("max-batch user_steps:sized_step --memory 1GiB --donate weights", 2, "'weights'"),
    ("max-batch user_steps:sized_step --memory 1GiB --static weights", 2, "'weights'"),
    ("max-batch user_steps:sized_step --memory 1GiB --timeout inf", 2, "seconds"),
    ("max-batch user_broken:step --memory 1GiB", 3, "no_such_library"),
    ("plan user_steps:gradient", 0, "predicted peak"),
    (
        "plan user_steps:out_of_reach --budget 1GiB --target cpu",
        1,
        "lowest peak is 2 GiB",
    ),
    ("plan user_steps:gradient --offload", 2, "needs a --budget"),
    ("plan user_steps:gradient --host-budget 1GiB", 2, "needs --offload"),
    ("plan user_steps:gradient --budget 0", 2, "more than 0 bytes"),
    ("plan user_steps:gradient --search-seconds 1", 2, "needs a --budget"),
    ("plan user_steps:gradient --quick", 2, "--quick: needs a --budget"),
    ("plan user_steps:gradient --search-seconds inf", 2, "no number of seconds"),
    ("plan user_steps:gradient --clip never", 2, "two_pass"),
    ("plan user_steps:gradient --plot plan.png", 2, "needs a --target"),
    ("plan user_steps:gradient --target h1000", 2, "unknown target"),
    ("plan user_steps:gradient --args nothing", 2, "no function 'nothing'"),
    ("plan user_steps:sized_step --batch 0", 2, "--batch"),
    ("plan user_steps:step --donate weights", 2, "'weights'"),
    ("plan user_steps:step --static weights", 2, "'weights'"),
    ("plan user_steps:clipped --clip two_pass", 0, "predicted peak"),
    ("plan user_steps:not_traceable", 3, "TracerBoolConversionError"),
    ("lint user_steps:gradient", 0, "nothing found"),
    ("lint user_steps:misnamed", 1, "no such name"),
    ("lint user_steps:step --args args", 0, "not donated"),
    ("lint user_steps:step --args args --fail-on warning", 1, "not donated"),
    ("lint user_steps:step --target h1000", 2, "unknown target"),
    ("lint user_steps:step --args nothing", 2, "no function 'nothing'"),
    ("lint user_steps:sized_step --batch 0", 2, "--batch"),
    ("lint user_steps:step --donate weights", 2, "'weights'"),
    ("lint user_steps:step --static weights", 2, "'weights'"),
    ("lint user_steps:step --timeout inf", 2, "no number of seconds"),
    ("lint user_steps:misnamed --fail-on never", 0, "no such name"),
    ("lint user_steps:gradient --fail-on always", 2, "always"),
    ("lint user_steps:not_traceable", 3, "cannot be traced"),
    ("audit user_steps:gradient", 0, "no findings"),
    ("audit user_steps:step --target h1000", 2, "unknown target"),
    ("audit user_steps:step --args nothing", 2, "no function 'nothing'"),
    ("audit user_steps:sized_step --batch 0", 2, "--batch"),
    ("audit user_steps:step --donate weights", 2, "'weights'"),
    ("audit user_steps:step --static weights", 2, "'weights'"),
    ("audit user_steps:step --timeout inf", 2, "no number of seconds"),
    ("audit user_steps:not_traceable", 3, "cannot be traced"),
    ("check user_steps:step user_steps:step", 0, "step agrees with step on cpu"),
    ("check user_steps:gradient user_steps:gradient", 0, "1 result, 3 steps"),
    ("check user_steps:plain user_steps:wrong --steps 1", 1, "wrong on cpu: 1 of 1"),
    ("check user_steps:step user_steps:not_a_function", 2, "no function"),
    ("check user_steps:step user_steps:step --steps 0", 2, "--steps"),
    ("check user_steps:step user_steps:step --args nothing", 2, "no function"),
    ("check user_steps:sized_step user_steps:step --batch 0", 2, "--batch"),
    ("check user_steps:step user_steps:step --static weights", 2, "'weights'"),
    ("check user_steps:step user_steps:step --script script.txt", 2, ".py"),
    ("check user_steps:not_traceable user_steps:step", 3, "TracerBool"),
    ("diff user_steps:gradient user_steps:plain", 0, "compiled instructions"),
    ("diff user_steps:gradient user_steps:gradient --max 1GiB", 0, "totals"),
    ("diff user_steps:gradient user_steps:gradient --max 1KiB", 1, "above the limit"),
    ("diff user_steps:gradient", 2, "give a second step"),
    ("diff user_steps:gradient user_steps:step --args nothing", 2, "no function"),
    ("diff user_steps:sized_step user_steps:sized_step --batch 0", 2, "--batch"),
    ("diff user_steps:step user_steps:step --donate weights", 2, "'weights'"),
    ("diff user_steps:step user_steps:step --static weights", 2, "'weights'"),
    ("diff user_steps:step user_steps:step --target h1000", 2, "unknown target"),
    ("diff user_steps:step user_steps:step --timeout inf", 2, "no number of seconds"),
    ("diff user_steps:step user_steps:step --reduce-seconds 0", 2, "--reduce-seconds"),
    ("diff user_steps:step user_steps:step --max 1parsec", 2, "--max"),
    ("diff user_steps:step user_steps:step --max-ms -1", 2, "--max-ms"),
    ("diff user_steps:step user_steps:step --max-growth x", 2, "no percentage"),
    ("diff user_steps:step --commit-a nothing", 2, "a commit of a git repository"),
    ("diff user_steps:step --commit-b nothing", 2, "a commit of a git repository"),
    ("diff user_steps:step --python-a nothing", 2, "a Python executable"),
    ("diff user_steps:step --python-b nothing", 2, "a Python executable"),
    ("diff missing.json user_steps:step", 2, "a report that was saved"),
    ("diff user_steps:step user_steps:not_traceable", 3, "cannot be traced"),
    ("diff user_steps:plain user_steps:plain --reduce out.py", 3, "nothing to reduce"),
    ("diff user_steps:plain user_steps:plain --max-ms 3", 3, "no seconds"),
    ("diff user_broken:step user_steps:step", 3, "no_such_library"),
    ("explain oom.log", 0, "true peak"),
    ("explain oom.log --target l4 --step user_steps:step", 3, "targets --install gpu"),
    ("explain oom.log --step user_steps:not_traceable", 3, "cannot be traced"),
    ("explain oom.log --step user_broken:step", 3, "no_such_library"),
    ("explain oom.log --step nothing", 2, "expected MODULE:FUNCTION"),
    ("explain oom.log --step user_steps:step --args nothing", 2, "no function"),
    ("explain oom.log --step user_steps:sized_step --batch 0", 2, "--batch"),
    ("explain oom.log --step user_steps:step --donate weights", 2, "'weights'"),
    ("explain oom.log --step user_steps:step --static weights", 2, "'weights'"),
    ("explain oom.log --step user_steps:step --timeout inf", 2, "seconds"),
    ("explain oom.log --donate 0", 2, "--donate needs a --step"),
    ("explain oom.log --target h1000", 2, "unknown target"),
    ("explain missing.log", 2, "no file missing.log"),
    ("explain .", 3, "cannot be read"),
    ("explain user_steps.py", 1, "no out-of-memory error"),
    ("ledger user_steps:params_and_tx", 0, "moments"),
    ("ledger user_steps:tx --args params --max 1MiB", 0, "within --max: a device"),
    ("ledger user_linen:step", 0, "ScaleByAdamState.mu"),
    ("ledger user_nnx:step", 0, "ScaleByAdamState.mu"),
    ("ledger user_steps:params_and_tx --max 1KiB", 1, "more than --max: a device"),
    ("ledger user_steps:params_and_tx --max 1parsec", 2, "--max"),
    ("ledger user_steps:params_and_tx --micro-batches 0", 2, "--micro-batches"),
    ("ledger user_steps:params_and_tx --gradient-dtype int8", 2, "gradient_dtype"),
    ("ledger user_steps:params_and_tx --accumulator-dtype f3", 2, "accumulator_dtype"),
    ("ledger user_steps:plain", 2, "must return (params, tx)"),
    ("ledger user_steps:tx --args args", 2, "must return (params,)"),
    ("ledger user_steps:not_a_function", 2, "int, no function"),
    ("ledger user_steps:params_and_tx --released nothing/**", 2, "nothing/**"),
    ("ledger user_steps:broken", 3, "no weights to be found"),
    ("targets", 0, "jax-cuda13-plugin is missing"),
    ("targets --list", 0, "nothing is installed"),
    ("targets --remove", 0, ""),
    ("targets --install --list", 2, "one of --install"),
    ("targets old --install", 2, "nothing old"),
    ("targets gpu", 2, "needs --install or --remove"),
    ("targets --remove --json out.json", 2, "no result"),
    ("targets cpu --install", 2, "cpu"),
    ("targets tpu --install", 3, "PIP_NO_INDEX=1 PIP_FIND_LINKS=FOLDER"),
    ("demo --steps 2", 0, ""),
    ("demo --steps 0", 2, "--steps"),
    ("demo --target h1000", 2, "h1000"),
    ("demo --optimizer sgd", 2, "sgd"),
    ("demo --model torch", 2, "torch"),
    ("demo --batch 0", 2, "--batch"),
    ("demo --dropout 1", 2, "--dropout"),
    ("demo --seed x", 2, "--seed"),
    ("demo --micro-batches 3", 2, "micro_batches"),
    ("demo --technique magic", 2, "magic"),
    ("demo --target h100", 3, "targets --install gpu"),
    ("layout buffers.csv", 0, "96 bytes"),
    ("layout hard.csv --capacity 1000 --time-limit 0", 1, "does not fit"),
    ("layout missing.csv", 2, "missing.csv"),
    ("layout buffers.csv --capacity 1parsec", 2, "--capacity"),
    ("layout buffers.csv --time-limit inf", 2, "no number of seconds"),
    ("layout buffers.csv --seed -1", 2, "--seed"),
    ("layout empty.csv --plot none.png", 3, "no picture"),
]


@pytest.mark.parametrize("line, code, words", CASES, ids=[c[0] for c in CASES])
def test_exit_codes(steps, monkeypatch, line, code, words):
    (steps / "buffers.csv").write_text(BUFFERS)
    (steps / "oom.log").write_text(OUT_OF_MEMORY)
    (steps / "empty.csv").write_text("id,lower,upper,size\n")
    write_buffers(steps / "hard.csv", guillotine(150, 100, 1000, seed=0))
    with (steps / "user_steps.py").open("a") as file:
        file.write("def out_of_reach(): return gradient()\n")
        file.write("def clipped(): return *gradient(), {'clip': 'two_pass'}\n")
    if line.startswith("estimate") and code < 2:
        report = SimpleNamespace(peak_bytes=48 * 1024, memory_bytes=None)
        monkeypatch.setattr(jaxmem, "estimate", lambda *args, **how: report)
    if "out_of_reach" in line:  # a search compiles, and is tested elsewhere

        def refuse(*args, **how):
            raise BudgetError("the lowest peak is 2 GiB")

        step = SimpleNamespace(plan=refuse)
        monkeypatch.setattr(jaxmem, "schedule", lambda *args, **how: step)
    result = invoke(*line.split())
    assert result.exit_code == code, result.output
    assert words in result.output
    assert "Traceback" not in result.output
    if code > 1:
        assert not result.stdout or "--plot" in line
        said = [x for x in result.stderr.splitlines() if x.startswith("jaxmem")]
        assert len(said) == 1, result.stderr


def test_every_command_has_every_exit_code():
    codes = {name: set() for name in COMMANDS}
    for line, code, _ in CASES:
        codes[line.split()[0]].add(code)
    never_too_large = {"targets", "demo"}
    elsewhere = {"audit"}  # of a wrong module: in the test below
    for name, found in codes.items():
        seldom = name in never_too_large | elsewhere
        assert found == {0, 2, 3} | ({1} - ({1} if seldom else set()))


def test_a_finding_of_the_audit_exits_with_1(steps, monkeypatch):
    fault = AuditFinding("two_outputs", "two outputs have one buffer", "fusion.1")
    report = AuditReport("step", "cpu", (fault,))
    monkeypatch.setattr(jaxmem, "audit", lambda *args, **how: report)
    result = invoke("audit", "user_steps:gradient")
    assert result.exit_code == 1 and "two outputs have one buffer" in result.output


def _options():
    """(command, option, its callback) of all options that take a value."""
    for command in typer.main.get_command(app).commands.values():
        for option in command.params:
            if option.param_type_name == "option" and not option.is_flag:
                yield command.name, option.opts[0], option.callback


OPTIONS = list(_options())
WRITTEN = "--json --html --plot --output --out --script --reduce".split()
REQUIRED = {"targets": "", "demo": "", "layout": "missing.csv", "explain": "no.log"}
REQUIRED["diff"] = "user_broken:step user_broken:step"
REQUIRED["check"] = "user_broken:step user_broken:step"


@pytest.mark.parametrize(
    "name, option", [o[:2] for o in OPTIONS if o[1] not in WRITTEN]
)
def test_every_option_that_takes_a_value_has_one_that_is_refused(name, option):
    wrong = [line for line, code, _ in CASES if code == 2 and f"{name} " in line]
    assert any(f"{option} " in line for line in wrong)


@pytest.mark.parametrize("name, option", [o[:2] for o in OPTIONS if o[1] in WRITTEN])
def test_what_cannot_be_written_is_refused_before_any_work(steps, name, option):
    suffixes = {"--html": ".html", "--plot": ".png", "--script": ".py"}
    suffix = {**suffixes, "--reduce": ".py"}.get(option, "")
    (steps / f"folder{suffix}").mkdir()
    (steps / "file").touch()
    words = [name, *REQUIRED.get(name, "user_broken:step").split(), option]
    # a module that cannot be imported, a file that is not there: neither is looked at
    for path in (f"file/x{suffix}", f"folder{suffix}", f"no/such/x{suffix}"):
        if option == "--out" and not path.startswith("file"):
            continue  # a folder is made where there is none
        result = invoke(*words, path)
        assert result.exit_code == 3, result.output
        (line,) = result.stderr.splitlines()
        assert f"{option}: {path} " in line and not result.stdout
    if suffix:
        result = invoke(*words, "out.gif")
        assert result.exit_code == 2 and not result.stdout
        assert f"out.gif does not end in {suffix}" in result.stderr
    assert not (steps / "no").exists()


def test_a_picture_without_matplotlib_is_refused_before_any_work(steps, monkeypatch):
    find = importlib.util.find_spec
    none = lambda name, *rest: None if name == "matplotlib" else find(name, *rest)
    monkeypatch.setattr("importlib.util.find_spec", none)
    result = invoke("estimate", "user_broken:step", "--plot", "out.png")
    assert result.exit_code == 3 and "drawing needs matplotlib" in result.stderr


@pytest.mark.parametrize(
    "limit, code", [pytest.param("1MiB", 0, marks=pytest.mark.slow), ("1KiB", 1)]
)
def test_a_reader_that_goes_away_changes_nothing(steps, limit, code):
    """As in `jaxmem ... | head -1`: its code and its files are those of the result."""
    reader, writer = os.pipe()
    os.close(reader)
    words = "residuals user_steps:loss --json out.json --max".split()
    done = subprocess.run(
        [sys.executable, "-m", "jaxmem", *words, limit],
        stdout=writer,
        stderr=writer if code else subprocess.PIPE,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
    )
    os.close(writer)
    assert done.returncode == code and not done.stderr
    assert json.loads((steps / "out.json").read_text())["entries"]


@pytest.mark.parametrize(
    "line, key",
    [
        ("residuals user_steps:loss", "entries"),
        ("max-batch user_steps:sized_step --memory 3GiB", "batch"),
        ("plan user_steps:gradient", "fingerprint"),
        ("lint user_steps:gradient", "findings"),
        ("ledger user_steps:params_and_tx --max 1MiB", "rows"),
        ("demo", "loss_gap"),
        ("layout buffers.csv", "buffers"),
        ("targets", None),
        ("targets --list", None),
    ],
)
def test_json_goes_to_a_file_or_alone_to_standard_output(steps, line, key):
    (steps / "buffers.csv").write_text(BUFFERS)
    result = invoke(*line.split(), "--json", "-")
    assert result.exit_code == 0, result.output
    printed = json.loads(result.stdout)
    assert key is None or key in printed
    result = invoke(*line.split(), "--json", "out.json")
    written = json.loads((steps / "out.json").read_text())
    volatile = {"seconds", "planning_seconds", "fingerprint"}
    if key is None:
        assert written == printed
    else:
        assert {k: written[k] for k in printed if k not in volatile} == {
            k: v for k, v in printed.items() if k not in volatile
        }


@pytest.mark.parametrize(
    "line",
    [
        "residuals user_steps:loss",
        "plan user_steps:gradient",
        "lint user_steps:gradient",
        "ledger user_steps:params_and_tx",
    ],
)
def test_a_page_is_written(steps, line):
    result = invoke(*line.split(), "--html", "page.html")
    assert result.exit_code == 0, result.output
    page = (steps / "page.html").read_text()
    assert page.lstrip().lower().startswith("<!doctype html>") and "</html>" in page


@pytest.mark.parametrize("how", ["flag", "variable"])
def test_the_traceback_is_shown_where_it_is_asked_for(steps, how):
    extra = ["--traceback"] if how == "flag" else []
    env = {"JAXMEM_TRACEBACK": "1"} if how == "variable" else {}
    result = invoke("estimate", "user_steps:broken", *extra, env=env)
    assert result.exit_code == 3
    assert "Traceback" in result.stderr and "to be found" in result.stderr
    assert "in broken" in result.stderr


def test_without_a_command_the_help_is_shown():
    result = invoke()
    assert result.exit_code == 2 and "estimate" in result.output


def test_an_unknown_command_and_option_are_told_in_a_line():
    for words in (("estimates",), ("targets", "--instal")):
        result = invoke(*words)
        assert result.exit_code == 2
        (line,) = result.stderr.splitlines()
        assert words[-1] in line and "--help" in line


def test_version():
    result = invoke("--version")
    assert result.exit_code == 0
    assert result.stdout == f"jaxmem {jaxmem.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion(shell, monkeypatch):
    """The shell asks the command for what may follow."""
    monkeypatch.setenv("COMP_WORDS", "jaxmem max")
    monkeypatch.setenv("COMP_CWORD", "1")
    monkeypatch.setenv("_TYPER_COMPLETE_ARGS", "jaxmem max")
    monkeypatch.setenv("_TYPER_COMPLETE_FISH_ACTION", "get-args")
    env = {"_JAXMEM_COMPLETE": f"complete_{shell}"}
    assert "max-batch" in invoke(env=env, prog_name="jaxmem").output


@pytest.mark.parametrize(
    "flags, optimizer, n",
    [
        ((), "adamw", 1),
        (("--micro-batches", "4"), "adamw", 4),
        (("--optimizer", "adama"), "adama", 8),
        (("--optimizer", "adama", "--micro-batches", "2"), "adama", 2),
    ],
)
def test_demo_takes_an_optimizer(flags, optimizer, n, tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("jaxmem.demo.run", lambda *args: seen.append(args[0]))
    result = invoke("demo", *flags, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert (seen[0].optimizer, seen[0].n) == (optimizer, n)


@pytest.mark.parametrize("wrong", [("--model", "torch"), ("--micro-batches", "3")])
def test_demo_refuses_bad_options(wrong, tmp_path):
    assert invoke("demo", *wrong, "--out", tmp_path).exit_code == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["user_steps", "user_linen", "user_nnx", "user_equinox"]
)
@pytest.mark.parametrize("command", ["estimate", "plan", "lint"])
def test_steps_of_all_frameworks(steps, kind, command):
    if kind == "user_equinox":
        pytest.importorskip("equinox")
    target = ("--target", "cpu") if command == "estimate" else ()
    with jax.numpy_dtype_promotion("standard"):  # as users have it
        result = invoke(command, f"{kind}:step", *target, "--json", "out.json")
    assert result.exit_code == 0, result.output
    if command == "estimate":
        report = json.loads((steps / "out.json").read_text())
        assert report["name"] == "step" and report["peak_bytes"] > 4 * 8 * 8


@pytest.mark.slow
def test_as_a_process(steps):
    """`python -m jaxmem`, with plain lines of progress where stderr is a pipe."""
    run = lambda *words: subprocess.run(
        [sys.executable, "-m", "jaxmem", *words],
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([".", *sys.path])},
    )
    done = run("estimate", "user_steps:gradient", "--max", "1GiB")
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines() == ["compiling for cpu"]
    assert "within --max" in done.stdout
    assert run("estimate", "user_steps:gradient", "--max", "1KiB").returncode == 1
    assert run("estimate").returncode == 2
    failed = run("estimate", "user_broken:step")
    assert failed.returncode == 3 and len(failed.stderr.splitlines()) == 1


def test_help_shows_the_convention_and_needs_no_jax():
    code = (
        "import sys; from jaxmem.cli import main; sys.argv = ['jaxmem', 'estimate', "
        "'--help']\ntry: main()\nexcept SystemExit: pass\n"
        "assert not {'jax', 'flax', 'optax', 'matplotlib'} & set(sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "train_step" in done.stdout and "donate_argnums" in done.stdout


def test_an_error_is_explained_from_the_standard_input():
    result = invoke("explain", "-", "--json", "-", input=OUT_OF_MEMORY)
    assert result.exit_code == 0
    assert json.loads(result.stdout)["diagnosis"] == "true peak"
