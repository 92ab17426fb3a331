"""What surrounds the code is valid, true, and agrees with itself."""

import pathlib
import re
import shlex
import shutil
import subprocess
import tomllib

import pytest

yaml = pytest.importorskip("yaml")

ROOT = pathlib.Path(__file__).parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
TEMPLATES = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))
FILE = re.compile(r"[\w.*-]+(/[\w.*-]+)+|[\w-]+\.(py|md|toml|txt|cfg)")


def _load(path: pathlib.Path):
    return yaml.safe_load(path.read_text())


def _steps():
    for path in WORKFLOWS:
        for name, job in _load(path)["jobs"].items():
            yield from ((f"{path.name}: {name}", step) for step in job["steps"])


def _files(command: str):
    """Words of a shell command that name a file of the repository."""
    for word in shlex.split(command):
        word = word.removeprefix("$GITHUB_WORKSPACE/").removeprefix("./")
        made = word.startswith(("dist/", "docs/_build/"))
        if FILE.fullmatch(word) and not made:
            yield word


def test_names_of_files_are_found_in_commands():
    """Guards the pattern above."""
    command = '.ci/run x "$GITHUB_WORKSPACE/.ci/smoke.py" dist/*.whl setup.py --a-b'
    assert [*_files(command)] == [".ci/run", ".ci/smoke.py", "setup.py"]


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda p: p.name)
def test_workflow(path):
    flow = _load(path)
    assert flow["name"] and flow["permissions"] == {"contents": "read"}
    assert flow[True], "when it runs"  # YAML takes `on` for a bool
    for job in flow["jobs"].values():
        needs = [job["needs"]] if isinstance(job.get("needs"), str) else []
        assert set(needs) <= set(flow["jobs"])
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step)


def test_workflows_run_files_that_exist():
    commands = [(where, step["run"]) for where, step in _steps() if "run" in step]
    named = [(where, file) for where, line in commands for file in _files(line)]
    assert {file for _, file in named} >= {".ci/run", ".ci/slow", ".ci/build"}
    assert [x for x in named if not (ROOT / x[1]).exists()] == []


def test_actions_have_versions():
    used = [step["uses"] for _, step in _steps() if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[\w./-]+", x) for x in used)


def test_ci_runs_the_oldest_and_the_newest_jax():
    (job,) = _load(ROOT / ".github/workflows/ci.yml")["jobs"].values()
    rows = {(x["python"], x["jax"]) for x in job["strategy"]["matrix"]["include"]}
    assert rows == {("3.11", "0.10.2"), ("3.12", "")}
    assert f"Python :: {min(rows)[0]}" in " ".join(PROJECT["classifiers"])


def test_pyright_reads_what_is_installed():
    """CI, the hook before a commit and the guide leave it to `pyproject.toml`."""
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    packages = tools["hatch"]["build"]["targets"]["wheel"]["packages"]
    assert tools["pyright"]["include"] == packages
    assert "pyright" in map(str.strip, (ROOT / ".ci" / "run").read_text().splitlines())
    hooks = _load(ROOT / ".pre-commit-config.yaml")["repos"][0]["hooks"]
    assert {h["id"]: h["entry"] for h in hooks}["pyright"] == "pyright"
    guide = (ROOT / "CONTRIBUTING.md").read_text()
    words = "`pyright` reads what is installed, `{}` and `{}`".format(*packages)
    assert words in guide


SCRIPTS = "run slow build interpreters environment smoke.py".split()


@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts_run_files_that_exist(name):
    lines = (ROOT / ".ci" / name).read_text().splitlines()
    if not name.endswith(".py"):
        words = [w for line in lines if line[:1] != "#" for w in line.split()]
        files = [w for w in words if FILE.fullmatch(w.strip('"'))]
        assert [f for f in files if not (ROOT / f.strip('"')).exists()] == []
    if name in SCRIPTS[:4]:
        assert (ROOT / ".ci" / name).stat().st_mode & 0o111, "it can be executed"


@pytest.fixture
def interpreters(tmp_path):
    """What `.ci/interpreters` says where there are no Pythons but these."""

    def run(working=(), broken=(), **environment):
        for name, code in [*((x, 0) for x in working), *((x, 127) for x in broken)]:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(f"#!{shutil.which('sh')}\nexit {code}\n")
            path.chmod(0o755)
        known = {"PATH": str(tmp_path / "bin"), "PYENV_ROOT": str(tmp_path / "pyenv")}
        command = [shutil.which("bash"), ROOT / ".ci" / "interpreters"]
        how = {"capture_output": True, "text": True, "env": known | environment}
        return subprocess.run(command, check=False, **how)

    return run


def test_both_versions_are_tried_where_there_is_a_python_for_each(interpreters):
    done = interpreters(["bin/python3.11", "bin/python3.12"])
    assert done.stdout == "0.10.2 python3.11\nnewest python3.12\n"
    assert (done.stderr, done.returncode) == ("", 0)


def test_a_python_that_does_not_run_is_none(interpreters, tmp_path):
    """As a name of pyenv on the path, for a version that is not chosen there."""
    its = "pyenv/versions/3.12.1/bin/python"
    done = interpreters(["bin/python3.11", its], broken=["bin/python3.12"])
    assert done.stdout == f"0.10.2 python3.11\nnewest {tmp_path / its}\n"


@pytest.mark.parametrize(
    ("there", "tried", "jax", "missing"),
    [("3.11", "0.10.2", "newest", "3.12"), ("3.12", "newest", "0.10.2", "3.11")],
)
def test_it_is_said_which_version_is_not_tried(
    interpreters, there, tried, jax, missing
):
    done = interpreters([f"bin/python{there}"], broken=[f"bin/python{missing}"])
    assert done.stdout == f"{tried} python{there}\n"
    words = f"not tried: jax {jax}, since no python{missing} runs here\n"
    assert (done.stderr, done.returncode) == (words, 0)


def test_without_a_python_there_is_nothing_to_run(interpreters):
    done = interpreters()
    assert done.stdout == "" and done.returncode == 1
    assert done.stderr.endswith("name a Python in PYTHON\n")


@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"PYTHON": "python3.13"}, "newest python3.13"),
        ({"JAX": "0.11.0"}, "0.11.0 python3"),
        ({"JAX": ""}, "newest python3"),  # as in the matrix of CI
    ],
    ids=str,
)
def test_the_version_that_is_asked_for_is_tried_alone(interpreters, given, line):
    done = interpreters(["bin/python3.11", "bin/python3.12"], **given)
    assert (done.stdout, done.returncode) == (f"{line}\n", 0)


@pytest.mark.parametrize("path", TEMPLATES, ids=lambda p: p.name)
def test_issue_template(path):
    form = _load(path)
    if path.name == "config.yml":
        return
    assert form["name"] and form["description"]
    fields = form["body"]
    assert len({f["id"] for f in fields}) == len(fields)
    kinds = {"markdown", "textarea", "input", "dropdown", "checkboxes"}
    assert all(f["type"] in kinds and f["attributes"]["label"] for f in fields)


def test_citation():
    """The fields that the schema of the Citation File Format, 1.2.0, requires."""
    citation = _load(ROOT / "CITATION.cff")
    assert citation["cff-version"] == "1.2.0" and citation["message"]
    assert PROJECT["name"] in citation["title"]
    assert str(citation["version"]) == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
    assert [a["name"] for a in citation["authors"]] == [
        a["name"] for a in PROJECT["authors"]
    ]
    urls = PROJECT.get("urls", {})
    assert citation.get("repository-code") == urls.get("Repository")


def test_changelog_has_a_section_for_the_version():
    text = (ROOT / "CHANGELOG.md").read_text()
    titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert titles[0] == "Unreleased"
    dated = r"(\d+\.\d+\.\d+) \((\d{4}-\d{2}-\d{2}|not tagged yet|never tagged)\)"
    sections = [re.fullmatch(dated, title) for title in titles[1:]]
    assert all(sections), titles
    assert sections[0][1] == PROJECT["version"]
    assert [s[2] for s in sections[1:]].count("not tagged yet") == 0
    kinds = {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}
    assert set(re.findall(r"^### (.*)$", text, re.MULTILINE)) <= kinds


def test_it_is_said_which_versions_a_release_has_passed():
    text = (ROOT / "RELEASING.md").read_text()
    rows = re.findall(r"^\| (\d+\.\d+\.\d+) \|(.*)\|$", text, re.MULTILINE)
    oldest, newest = ("3.11: 0.10.2", r"3\.12: (?!0\.10)\d+\.\d+")
    changelog = (ROOT / "CHANGELOG.md").read_text()
    released = re.findall(r"^## (\d+\.\d+\.\d+)", changelog, re.MULTILINE)
    assert [version for version, _ in rows] == released
    for _, passed in rows:
        assert oldest in passed and re.search(newest, passed)


def test_metadata():
    classifiers = PROJECT["classifiers"]
    assert any(c.startswith("Development Status ::") for c in classifiers)
    minor = lambda c: re.fullmatch(r"Programming Language :: Python :: 3\.(\d+)", c)
    versions = [int(m[1]) for m in map(minor, classifiers) if m]
    assert PROJECT["requires-python"] == f">=3.{min(versions)}"
    assert (ROOT / PROJECT["readme"]).exists()
    assert all((ROOT / file).exists() for file in PROJECT["license-files"])


def test_extras_refer_to_extras():
    extras = PROJECT["optional-dependencies"]
    inner = [re.fullmatch(r"jaxmem\[(.*)\]", x) for v in extras.values() for x in v]
    named = {name for match in inner if match for name in match[1].split(",")}
    assert named and named <= set(extras)


PAGES = [*ROOT.glob("*.md"), *(ROOT / ".github").glob("*.md")]


@pytest.mark.parametrize("path", PAGES, ids=lambda p: p.name)
def test_links_to_files(path):
    """Of the Markdown pages at the top: links, and names of files in backticks."""
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", text)
    local = [x for x in links if "://" not in x]
    assert [x for x in local if not (path.parent / x).exists()] == []
