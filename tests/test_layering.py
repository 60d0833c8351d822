"""The house's rules about imports, read from the syntax trees."""

from __future__ import annotations

import ast
import functools
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

PROJECT = Path(__file__).parents[1]
OURS = ("quant", "data", "collector", "app")
ALLOWED = {
    "quant": set(),
    "data": {"quant"},
    "collector": {"quant", "data"},
    "app": {"quant", "data", "collector"},
}
SOURCES = sorted(path.relative_to(PROJECT).as_posix() for package in OURS for path in (PROJECT / package).rglob("*.py"))
PYTHON = subprocess.check_output(["git", "ls-files", "*.py"], cwd=PROJECT, text=True).split()
IN_A_PROGRAM = re.compile(rf"(?:^|;) *(?:from (?:{'|'.join(OURS)})[. ]|import (?:{'|'.join(OURS)})\b)", re.MULTILINE)
TORCH = {"torch", "triton", "duckdb", "streamlit", "pandas"}


def imported(source: str, package: str) -> set[str]:
    """Dotted names that a module imports at any depth: statements, relative ones too, and import_module("literal").

    `from a import b` gives both a and a.b, since b may be a module.
    """
    names: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            home = ".".join([*parents, *([node.module] if node.module else [])])
            names |= {home} | {f"{home}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
            called = getattr(node.func, "id", getattr(node.func, "attr", ""))
            if called in ("import_module", "__import__") and isinstance(node.args[0].value, str):
                names.add(node.args[0].value)
    return names


@functools.cache
def imports_of(path: str) -> set[str]:
    """What a file imports; of ours without the leading "binade."."""
    package = ".".join(["binade", *path.split("/")[:-1]])
    return {name.removeprefix("binade.") for name in imported((PROJECT / path).read_text(), package)}


def roots(names: set[str]) -> set[str]:
    return {name.partition(".")[0] for name in names}


def test_the_four_packages_are_found():
    assert {path.partition("/")[0] for path in SOURCES} == set(OURS)
    assert all((PROJECT / "binade" / package).resolve() == PROJECT / package for package in OURS)
    assert {"quant/reference.py", "data/index/catalog.py", "collector/training/config.py", "app/main.py"} <= set(
        SOURCES
    )


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("import triton.language as tl", "triton.language"),
        ("def f():\n    from duckdb import connect", "duckdb"),
        ("if x:\n    import_module('torch')", "torch"),
        ("importlib.import_module('binade.quant.gemm')", "binade.quant.gemm"),
        ("from . import train", "collector.sub.train"),
        ("from ..train import train", "collector.train"),
        ("from collector import train", "collector.train"),
    ],
)
def test_the_walker_sees(source, found):
    assert found in imported(source, "collector.sub")


@pytest.mark.slow
def test_our_packages_are_imported_from_binade():
    """A top-level `app` or `data` may be the user's own. Nor do programs in strings import it."""
    for path in PYTHON:
        source = (PROJECT / path).read_text()
        names = imported(source, "binade")
        assert not roots(names) & set(OURS), f"{path}: write `from binade.{min(roots(names) & set(OURS))} import ...`"
        if path not in ("tests/test_layering.py", "tests/test_packaging.py", "tests/faults/test_faults.py"):
            programs = [node.value for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Constant)]
            inner = [text for text in programs if isinstance(text, str) and IN_A_PROGRAM.search(text)]
            assert not inner, f"{path}: a program in a string imports {IN_A_PROGRAM.search(inner[0])[0].strip()}"


@pytest.mark.parametrize("package", OURS)
def test_imports_run_one_way(package):
    """Nor does anything import the tests."""
    forbidden = {*OURS, "tests"} - {package} - ALLOWED[package]
    found = {path: roots(imports_of(path)) & forbidden for path in SOURCES if path.startswith(f"{package}/")}
    assert found and not {path: names for path, names in found.items() if names}


def module_of(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def test_no_file_imports_itself_by_way_of_others():
    """Imports in functions and for types count, those of packages only where a name is imported from them."""
    modules = {module_of(path): path for path in SOURCES}
    graph: dict[str, set[str]] = {name: set() for name in modules}
    for name, path in modules.items():
        for node in ast.walk(ast.parse((PROJECT / path).read_text())):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("binade."):
                home = node.module.removeprefix("binade.")
                targets = {f"{home}.{alias.name}" for alias in node.names}
                graph[name] |= {target if target in modules else home for target in targets} & modules.keys()
    while free := [name for name, imports in graph.items() if not imports & graph.keys()]:
        for name in free:  # what imports nothing that is left is in no circle
            del graph[name]
    assert not {name: sorted(imports & graph.keys()) for name, imports in graph.items()}


def test_the_collector_imports_downward():
    levels = (  # probes and capture are one: probes use its clock and adapters, recorder.py and instrument.py add them
        *("errors", "settings", "ranks", "models", "recipes", "capture", "pretrained", "datasets"),
        *("training", "experiment", "jobs", "imports", "audit", "advice", "cli"),
    )
    found = {}
    for path in SOURCES:
        own, *below = path.removesuffix(".py").split("/")
        if own != "collector" or below == ["__init__"]:
            continue
        above = levels[levels.index("capture" if below[0] == "probes" else below[0]) + 1 :]
        above += ("probes",) if below[0] in levels[: levels.index("capture")] else ()
        upward = {name for name in imports_of(path) if name.startswith("collector.") and name.split(".")[1] in above}
        if upward:
            found[path] = upward
    assert not found


def test_nothing_imports_the_package_or_the_command():
    package = re.compile(r"^ *import binade$", re.MULTILINE)
    assert not [path for path in SOURCES if "cli" in imports_of(path) or package.search((PROJECT / path).read_text())]


def test_no_class_name_is_used_twice():
    """A reader who searches for a class finds one. Classes within functions and classes are left out."""
    names = Counter(
        node.name for path in SOURCES for node in ast.parse((PROJECT / path).read_text()).body
        if isinstance(node, ast.ClassDef)
    )  # fmt: skip
    assert [name for name, count in names.items() if count > 1] == []


def test_app_takes_from_the_collector_only_what_imports_no_torch():
    paths = [path for path in SOURCES if path.startswith("app/")]
    taken = {name for path in paths for name in imports_of(path) if name.startswith("collector.")}
    leaves = ("collector.errors", "collector.settings", "collector.datasets.inputs")
    imports = ("collector.imports.registry", "collector.imports.readers.events")
    training = tuple(f"collector.training.{name}" for name in ("config", "plan", "slurm_options", "targets"))
    allowed = (*leaves, *imports, *training, "collector.recipes", "collector.jobs", "collector.advice")
    homes = {*allowed, *(name.rpartition(".")[0] for name in allowed)}  # `from a.b import c` names a.b as well
    strangers = {n for n in taken if n not in homes and not any(n.startswith(a + ".") for a in allowed)}
    assert taken and not strangers


@pytest.mark.parametrize(
    ("library", "at_home"),
    [
        ("triton", lambda path: path.startswith("quant/backends/triton_")),
        (
            "duckdb",
            lambda path: path.startswith("data/index/"),
        ),
        (
            "streamlit",
            lambda path: (
                (path.startswith("app/") and path.endswith(("page.py", "_view.py")))
                or path
                in (
                    *(
                        "app/main.py",
                        "app/frame/address.py",
                        "app/frame/bar.py",
                        "app/frame/callbacks.py",
                        "app/frame/frame.py",
                        "app/frame/rooms.py",
                        "app/draw/show.py",
                        "app/frame/state.py",
                    ),
                    *(
                        "app/cli.py",
                        "app/server.py",
                        "app/frame/users.py",
                        "app/frame/uploads.py",
                        "app/frame/downloads.py",
                    ),
                    *("app/frame/reruns.py", "app/draw/components.py", "app/frame/header.py"),
                    "app/frame/guard.py",  # which reads the messages of websockets
                    *("app/sessions/open_session.py", "app/pages/tensor_notes.py", "app/questions/layout.py"),
                )
            ),
        ),
        (
            "altair",
            lambda path: (
                path in ("app/draw/plot.py", "app/draw/style.py", "app/draw/figure.py", "app/pages/sql_chart.py")
                or path in ("app/cli.py", "app/report/writer.py")  # which turn off its checks
            ),
        ),
    ],
    ids=["triton", "duckdb", "streamlit", "altair"],
)
def test_a_library_stays_in_its_house(library, at_home):
    users = {path for path in SOURCES if library in roots(imports_of(path))}
    assert users, f"nothing imports {library}"
    assert not {path for path in users if not at_home(path)}


def test_imports_no_torch():
    without = (
        *("binade", "binade.cli", "binade.collector", "binade.collector.cli.options", "binade.collector.jobs"),
        *("binade.collector.imports.registry", "binade.collector.recipes.parse", "binade.collector.recipes.recipe"),
        *("binade.collector.training.config", "binade.data.exchange.export", "binade.quant.formats"),
    )
    assert not {module: TORCH & loaded for module, loaded in loaded_by(*without).items() if TORCH & loaded}


def test_reading_the_index_imports_no_torch():
    for module, loaded in loaded_by(
        "binade.data.index.catalog",
        "binade.data.compare.comparison",
        "binade.data.compare.ablation",
        "binade.collector.cli.compare",
    ).items():
        assert "duckdb" in loaded and not {"torch", "triton", "streamlit"} & loaded, module


def loaded_by(*modules: str) -> dict[str, set[str]]:
    """The top-level modules that are loaded once a module and those before it have been imported."""
    code = "; ".join(f"import sys, {name}; print(*{{n.partition('.')[0] for n in sys.modules}})" for name in modules)
    done = subprocess.run([sys.executable, "-c", code], cwd=PROJECT, capture_output=True, text=True, check=True)
    return dict(zip(modules, map(set, map(str.split, done.stdout.splitlines())), strict=True))


# What is longer than a reader wants, and why. Docstrings do not count.
LONG_FILES = {
    "quant/backends/triton_kernels.py": "the launches of one kernel, which share their helpers",
    "quant/scaling.py": "one class for each scale scheme",
    "collector/capture/recorder.py": "the public face: half of it is docstrings",
}
LONG_FUNCTIONS = {
    "quant/backends/triton_tiles.py:round_tile": "a kernel",
    "quant/backends/triton_scores.py:add_score": "a kernel",
    "quant/backends/triton_summary.py:summarize_kernel": "a kernel",
    "collector/training/loop.py:_train": "the order of a run, line by line",
}


def test_long_files_and_functions_are_listed_with_a_reason():
    files, functions = set(), set()
    for path in SOURCES:
        source = (PROJECT / path).read_text()
        if source.count("\n") > 500:
            files.add(path)
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                documented = ast.get_docstring(node) is not None and len(node.body) > 1
                first = node.body[1].lineno if documented else node.lineno
                if (node.end_lineno or 0) - first >= 60:
                    functions.add(f"{path}:{node.name}")
    assert (files, functions) == (LONG_FILES.keys(), LONG_FUNCTIONS.keys())
