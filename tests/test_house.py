"""The rules: imports go one way, exports are documented, import is cheap."""

import ast
import functools
import importlib
import io
import json
import pathlib
import re
import subprocess
import sys
import tokenize

import pytest

import jaxmem
import pallas_kernels
from jaxmem.ir import primitives

PACKAGE = pathlib.Path(jaxmem.__file__).parent
KERNELS = pathlib.Path(pallas_kernels.__file__).parent

# Which parts of jaxmem a part may import, besides itself and what all may.
ALL_MAY = {"_checks", "_compat", "_contexts"}
ALLOWED = {
    "_checks": set(),
    "_compat": set(),
    "_contexts": set(),
    "_paths": set(),
    "_bits": set(),
    "_float8": set(),
    "_garbage": set(),
    "_bytes": set(),
    "_module_path": set(),
    "_progress": set(),
    "_remedies": set(),
    "_deprecated": set(),
    "_adviser": set(),
    "__main__": {"cli"},
    "ir": {"_bits"},
    "cost": {"chips", "ir"},
    "pages": {"_remedies"},
    "chips": {"_bytes", "_remedies"},
    "frameworks": {"_paths", "ir"},
    "memory": {
        *("_adviser", "_bytes", "_garbage", "_module_path", "_progress", "_remedies"),
        *("chips", "cost", "frameworks", "ir", "pages"),
    },
    "ops": {"_bits", "_deprecated", "_float8", "_remedies", "ir"},
    "rewriting": {"ir", "ops"},
    "nn": {
        *("_deprecated", "frameworks", "ir", "memory", "ops", "pages", "rewriting"),
    },
    "optim": {
        *("_bytes", "_float8", "_paths", "_remedies", "frameworks", "ir", "pages"),
    },
    "planning": {"_bytes", "pages"},
    "faults": {"ir", "memory"},
    "auditing": {"chips", "faults", "frameworks", "ir", "memory", "pages"},
    "checking": {"_module_path", "frameworks", "ir", "pages"},
    "linting": {
        *("_bytes", "_module_path", "auditing", "chips", "cost", "faults"),
        *("frameworks", "ir", "memory", "pages", "scheduling"),
    },
    "scheduling": {
        *("_bits", "_garbage", "_module_path", "_progress", "auditing", "checking"),
        *("chips", "cost", "faults", "frameworks", "ir", "memory", "pages"),
        "planning",
    },
    "accumulate": {"_paths", "frameworks", "ir", "memory", "optim", "scheduling"},
    "freezing": {"_paths", "frameworks", "memory", "pages"},
    "advising": {
        *("_bytes", "_module_path", "_progress", "accumulate", "chips", "frameworks"),
        *("ir", "memory", "nn", "optim", "pages", "rewriting", "scheduling"),
    },
    "monitoring": {"_bytes", "_module_path", "frameworks", "memory", "pages"},
    "explaining": {"_bytes", "_module_path", "chips", "memory", "monitoring", "pages"},
    "diffing": {"_bytes", "chips", "frameworks", "ir", "memory"},
    "testing": {"diffing", "memory"},
    "demo": {
        *("accumulate", "memory", "nn", "ops", "optim", "pages", "rewriting"),
        "scheduling",
    },
    "cli": {
        *("_bytes", "_progress", "_remedies", "advising", "auditing"),
        *(
            "checking",
            "chips",
            "demo",
            "diffing",
            "explaining",
            "frameworks",
            "linting",
            "memory",
            "optim",
            "planning",
        ),
        "scheduling",
    },
}


def _part(path: pathlib.Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_the_page_of_the_architecture_names_every_package():
    page = (PACKAGE.parent / "docs" / "architecture.md").read_text()
    table = page.partition("| package | what it does |")[2].partition("\n\n")[0]
    cells = (row.split("|")[1] for row in table.splitlines()[2:])
    named = [name for cell in cells for name in re.findall(r"`(\w+)`", cell)]
    packages = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    assert sorted(named) == sorted(packages | {KERNELS.name})


@functools.cache
def _imports(path: pathlib.Path) -> list[str]:
    return [*_found_imports(ast.parse(path.read_text()))]


def _found_imports(tree: ast.Module):
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names)
        if isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{a.name}" for a in node.names)


SOURCES = [
    p for p in PACKAGE.rglob("*.py") if p.name != "__init__.py" or p.parent != PACKAGE
]


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(PACKAGE)))
def test_imports_go_one_way(path):
    part = _part(path)
    used = {n.split(".")[1] for n in _imports(path) if n.startswith("jaxmem.")}
    assert used <= ALLOWED[part] | {part} | ALL_MAY
    kernels = [n for n in _imports(path) if n.startswith("pallas_kernels")]
    assert part in ("chips", "ops", "optim") or not kernels


@pytest.mark.parametrize(
    "path", sorted(KERNELS.rglob("*.py")), ids=lambda p: str(p.relative_to(KERNELS))
)
def test_kernels_stand_on_jax_alone(path):
    assert not [n for n in _imports(path) if n.split(".")[0] == "jaxmem"]


EVERYTHING = [*SOURCES, *KERNELS.rglob("*.py")]


@pytest.mark.parametrize(
    "path", EVERYTHING, ids=lambda p: str(p.relative_to(PACKAGE.parent))
)
def test_private_jax_stays_in_compat(path):
    private = [n for n in _imports(path) if n.startswith(("jax._src", "jax.extend"))]
    allowed = path.is_relative_to(PACKAGE / "_compat") or path == KERNELS / "_compat.py"
    assert allowed or not private


def _private_imports(path: pathlib.Path):
    """ "importer: imported" for each private name of another subpackage or package."""
    inside = path.is_relative_to(PACKAGE)
    part = _part(path) if inside else KERNELS.name
    for name in _imports(path):
        package, *names = name.split(".")
        if package == "jaxmem" and names and (PACKAGE / names[0]).is_dir():
            package, *names = names
        if package == part or package not in ("pallas_kernels", *ALLOWED):
            continue
        for i, word in enumerate(names):
            if word.startswith("_"):
                yield f"{part}: {'.'.join([package, *names[: i + 1]])}"
                break


def test_no_private_name_crosses_a_package():
    """What two packages share is public in its owner's."""
    found = {name for path in EVERYTHING for name in _private_imports(path)}
    assert found == set(), "export these from their package"


def _modules() -> dict[str, pathlib.Path]:
    """The modules of the packages by name, those of folders included."""
    named = {}
    for path in EVERYTHING:
        below = path.relative_to(PACKAGE.parent).with_suffix("").parts
        name = below[:-1] if below[-1] == "__init__" else below
        named[".".join(name)] = path
    return named


def _circles() -> set[frozenset[str]]:
    """Files of one package that import each other, at once or round several.

    What a function imports, and what is for types alone, counts as well. A folder's
    `__init__` is not one of its files: it exports what they make.
    """
    modules = _modules()
    package = lambda name: name.split(".")[:2]
    files = {n for n, path in modules.items() if path.name != "__init__.py"}
    graph = {
        name: {n for n in _imports(modules[name]) if n in files} - {name}
        for name in files
    }
    graph = {
        name: {n for n in found if package(n) == package(name)}
        for name, found in graph.items()
    }
    reached = {name: _reached(graph, name) for name in graph}
    return {
        frozenset(n for n in reached[name] if name in reached[n])
        for name in graph
        if name in reached[name]
    }


def _reached(graph: dict[str, set[str]], start: str) -> set[str]:
    """What a file imports, and what that imports, and so on."""
    found: set[str] = set()
    left = [*graph[start]]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            left += graph[name]
    return found


def test_no_files_of_a_package_import_each_other():
    assert _circles() == set()


def test_a_circle_is_found(monkeypatch, tmp_path):
    """Round three files, one of which imports for types alone."""
    texts = {
        "a": "from jaxmem.optim.b import x",
        "b": "def f():\n    import jaxmem.optim.c",
        "c": "if TYPE_CHECKING:\n    from jaxmem.optim.a import y",
        "d": "from jaxmem.optim.a import y",
    }
    files = {name: tmp_path / f"{name}.py" for name in texts}
    for name, path in files.items():
        path.write_text(texts[name])
    named = {f"jaxmem.optim.{name}": path for name, path in files.items()}
    monkeypatch.setattr(sys.modules[__name__], "_modules", lambda: named)
    assert _circles() == {frozenset(n for n in named if not n.endswith("d"))}


def _without_flavour(path: pathlib.Path) -> str:
    """Flax's own two flavours have layers of one name, and so have ours."""
    return re.sub("linen|nnx", "flax", str(path))


def test_a_class_name_stands_for_one_thing():
    modules: dict[str, set[str]] = {}
    for path in EVERYTHING:
        for node in ast.parse(path.read_text()).body:
            if isinstance(node, ast.ClassDef):
                modules.setdefault(node.name, set()).add(_without_flavour(path))
    assert {name for name, paths in modules.items() if len(paths) > 1} == set()


def _exported():
    parts = (
        *(
            "accumulate",
            "checking",
            "diffing",
            "explaining",
            "freezing",
            "linting",
            "memory",
            "monitoring",
            "nn",
            "ops",
            "optim",
        ),
        *("planning", "scheduling", "testing"),
    )
    for package in ("jaxmem", *(f"jaxmem.{part}" for part in parts)):
        module = importlib.import_module(package)
        names = module.__all__ if package == "jaxmem" else vars(module)
        public = (n for n in names if not n.startswith("_") and n != "jaxtyping")
        yield from (f"{package}.{n}" for n in public)


# Words that the glossary has another word for, and where the code holds to that.
OTHER_WORDS = {"spread": "sharded", "treat": "placements"}
HELD = ("ir", "scheduling", "cost")


@pytest.mark.parametrize("part", HELD)
def test_names_are_the_words_of_the_glossary(part):
    found = [
        f"{path.name}: {name.string!r}; the word is {word!r}"
        for path in sorted((pathlib.Path(jaxmem.__file__).parent / part).rglob("*.py"))
        for name in tokenize.generate_tokens(io.StringIO(path.read_text()).readline)
        for other, word in OTHER_WORDS.items()
        if name.type == tokenize.NAME and other in name.string.lower()
    ]
    assert not found


@pytest.mark.parametrize("name", sorted(set(_exported())))
def test_exported_names_are_documented(name):
    module, attribute = name.rsplit(".", 1)
    value = getattr(importlib.import_module(module), attribute)
    assert (getattr(value, "__doc__", None) or "").strip(), f"{name} has no docstring"


def _ops():
    ops = importlib.import_module("jaxmem.ops")
    return [v for n, v in vars(ops).items() if callable(v) and not n.startswith("_")]


@pytest.mark.parametrize("op", _ops(), ids=lambda f: f.__name__)
def test_ops_say_what_they_save(op):
    assert "Saves:" in op.__doc__


IMPORTED = """
import json, sys, jax, flax.linen, flax.nnx
compiled, before = [], set(sys.modules)
jax.monitoring.register_event_duration_secs_listener(lambda name, *_, **__: (
    compiled.append(name) if name.endswith("backend_compile_duration") else None))
import jaxmem
jaxmem.estimate, jaxmem.substitute, jaxmem.ops
new = set(sys.modules) - before
jax.jit(lambda x: x + 1)(1)
print(json.dumps([sorted(new), len(compiled)]))
"""


def test_import_is_cheap():
    """Beyond jax and flax: the packages asked for, jaxtyping, and no compile."""
    run = [sys.executable, "-c", IMPORTED]
    done = subprocess.run(run, capture_output=True, text=True, check=True)
    new, compiled = json.loads(done.stdout)
    assert compiled == 1  # the one that shows that they are counted
    of_others = {n.split(".")[0] for n in new} - {"jaxmem", "pallas_kernels"}
    assert of_others <= {"jax", "jaxtyping", "runpy"}
    packages = {p.name for p in PACKAGE.iterdir() if (p / "__init__.py").exists()}
    loaded = {n.split(".")[1] for n in new if n.startswith("jaxmem.")}
    needed = {"_checks", "_compat", "chips", "cost", "frameworks", "ir", "memory"}
    needed |= {"nn", "ops", "pages"}
    assert loaded & packages == needed


# What reads compiled modules: its tables name the operations of HLO.
READS_HLO = ("auditing", "memory/buffers", "memory/time", "_module_path.py")
# Tables of primitives beside their records, and why each is no fact about them.
TABLES = {
    "diffing/_expressions.py _CALLS": "Python for each, where `jax.lax` has another",
    "checking/_probes.py _WRITTEN_OTHERWISE": "what rewrites write in another way",
    "checking/_walk.py _ENTERED": "a function for each",
    "ir/placements/rules.py RULES": "a function for each",
    "ir/placements/rules.py _SIZES": "which parameter of each names lengths",
    "ir/placements/layers.py OF_MODELS": "left out of updates, as not yet measured",
    "ir/placements/layers.py _ALONG": "words for each",
    "linting/rules/kept.py _OF_A_MASK": "the arithmetic of a dropout",
    "memory/_formula.py _INFIX": "a sign for each",
    "memory/_formula.py _NAMES": "words for each",
    "rewriting/_algebra.py POWERS": "an exponent for each operand",
    "rewriting/_algebra.py SIGNS": "a sign for each operand",
    "rewriting/_fold.py _FUNCTIONS": "a function of numbers for each",
    "scheduling/tiling/partial_sums.py _JOINED": "what gradients are put together by",
    "scheduling/tiling/sums.py _NEUTRAL": "functions of `lax`, not primitives",
}
NAMES = frozenset(record.name for record in primitives.KNOWN)


def _words(node: ast.expr) -> list[str]:
    """The texts of a table; of a dictionary those of its keys."""
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return [w for k, v in pairs for w in _words(v if k is None else k)]
    if isinstance(node, ast.Call) and ast.unparse(node.func) == "dict.fromkeys":
        return _words(node.args[0])
    texts = (n.value for n in ast.walk(node) if isinstance(n, ast.Constant))
    return [w for text in texts if isinstance(text, str) for w in text.split()]


def _tables(tree: ast.Module):
    """(name, texts) of each table that has a name, or that something is compared to."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            if isinstance(target, ast.Name):
                yield target.id, _words(node.value)
        elif isinstance(node, ast.Compare):
            tuples = (c for c in node.comparators if isinstance(c, ast.Tuple | ast.Set))
            yield from (("", words) for c in tuples if len(words := _words(c)) > 2)


def _of_primitives(name: str, words: list[str]) -> bool:
    found = [w for w in words if w in NAMES]
    is_constant = name.isupper() or not name
    return is_constant and len(found) > 1 and 2 * len(found) >= len(words)


def _outside_the_records():
    records = PACKAGE / "ir" / "primitives"
    for path in SOURCES:
        place = str(path.relative_to(PACKAGE))
        if not path.is_relative_to(records) and not place.startswith(READS_HLO):
            yield place, path.read_text()


def test_facts_about_primitives_stand_in_their_records():
    """Else they differ from file to file, and a new primitive is in one of them."""
    found = {
        f"{place} {name}"
        for place, text in _outside_the_records()
        for name, words in _tables(ast.parse(text))
        if _of_primitives(name, words)
    }
    assert found == TABLES.keys()


def test_equations_are_asked_for_their_records():
    """Comparisons with the name of a primitive are for those asked about once."""
    text = "\n".join(text for _, text in _outside_the_records())
    assert len(re.findall(r"primitive\.name", text)) <= 60
