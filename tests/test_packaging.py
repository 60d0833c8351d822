"""The wheel holds what it should, and works where only its declared dependencies are, next to a user's own modules."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tomllib
from importlib.metadata import Distribution, distribution
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.browser.driver import answers, free_port
from tests.conftest import until

pytestmark = pytest.mark.slow

PROJECT = Path(__file__).parents[1]
DECLARED = tomllib.loads((PROJECT / "pyproject.toml").read_text())["project"]
CORE = [Requirement(line) for line in DECLARED["dependencies"]]
EXTRA = [Requirement(line) for line in DECLARED["optional-dependencies"]["app"]]
PACKAGES = ("quant", "data", "collector", "app")

INSTRUMENTED = """
import sys
import torch
import app, data, quant
import binade

assert (app.OWNER, data.OWNER, quant.OWNER) == ("user",) * 3
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 32))
with binade.Recorder(sys.argv[1], scores=("mxfp4",)) as recorder, binade.instrument(model, "mxfp8", recorder):
    model(torch.randn(8, 64)).square().mean().backward()
print(binade.__file__)
"""


def run(*command: object, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=300, **options)


def pip(python: Path | str, *arguments: object) -> str:
    """This environment's pip for another interpreter, off line."""
    done = run(sys.executable, "-m", "pip", "--python", python, *arguments, "--no-index", "--disable-pip-version-check")
    assert done.returncode == 0, done.stderr
    return done.stdout


def files() -> list[str]:
    """What git knows or would add: no build, no runs."""
    listed = subprocess.check_output(["git", "ls-files", "-co", "--exclude-standard", "-z"], cwd=PROJECT, text=True)
    return [name for name in listed.split("\0") if (PROJECT / name).is_file() or (PROJECT / name).is_symlink()]


def copy_project(copy: Path) -> Path:
    """Copy the project, so that no build is left in it."""
    for name in files():
        (copy / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(PROJECT / name, copy / name, follow_symlinks=False)
    return copy


def needed_by(*requirements: Requirement) -> list[Distribution]:
    """The installed distributions that these need, and those that they need in turn."""
    found: dict[str, Distribution] = {}
    waiting = list(requirements)
    while waiting:
        requirement = waiting.pop()
        if requirement.name in found or (requirement.marker and not requirement.marker.evaluate({"extra": ""})):
            continue
        found[requirement.name] = distribution(requirement.name)
        waiting += map(Requirement, found[requirement.name].requires or ())
    return list(found.values())


def environment(where: Path, *requirements: Requirement) -> Path:
    """A new virtual environment's Python, with links to the installed packages that the requirements need."""
    run(sys.executable, "-m", "venv", "--without-pip", where, check=True)
    (packages,) = where.glob("lib/python*/site-packages")
    for found in needed_by(*requirements):
        for name in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / name).exists():
                (packages / name).symlink_to(found.locate_file(name))
    return where / "bin" / "python"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project with a run in data/runs."""
    copy = copy_project(tmp_path_factory.mktemp("source"))
    for name in ("run.json", "schema.sql", "module.py", "__init__.py"):
        (copy / "data/runs/a_run").mkdir(parents=True, exist_ok=True)
        (copy / "data/runs/a_run" / name).touch()
    return copy


@pytest.fixture(scope="module")
def wheel(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("wheel")
    pip(sys.executable, "wheel", "--no-build-isolation", "--no-deps", "-w", where, source)
    (built,) = where.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def core(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Python with the wheel and its core dependencies: no triton, no extra."""
    python = environment(tmp_path_factory.mktemp("core"), *CORE)
    pip(python, "install", "--no-deps", wheel)
    return python


@pytest.fixture
def user(tmp_path: Path) -> Path:
    """A directory whose modules have the names of our packages."""
    for name in ("app.py", "data.py", "data/__init__.py", "quant/__init__.py"):
        path = tmp_path / "user" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text('OWNER = "user"\n')
    return tmp_path / "user"


def test_wheel_holds_every_file_and_no_run(wheel):
    names = {name for name in ZipFile(wheel).namelist() if ".dist-info/" not in name}
    ours = {f"binade/{name}" for name in files() if name.partition("/")[0] in PACKAGES}
    top = {name for name in files() if name.startswith("binade/") and name.endswith(".py")}
    assert names == ours | top


def test_collects_with_core_dependencies_only(core, user, tmp_path):
    binade, root = core.with_name("binade"), tmp_path / "runs"
    options = {"cwd": user, "env": {**os.environ, "TENSOR_SAVE_DIR": str(root)}}
    done = run(binade, "quick", "mxfp8", "--backend", "torch", "--sequence-length", "32", **options)
    assert done.returncode == 0, done.stderr
    (status,) = root.glob("*/status.json")
    assert json.loads(status.read_text())["state"] == "done"

    done = run(binade, "quick", "mxfp8", "--backend", "triton", **options)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1)
    assert "triton" in done.stderr and "--backend torch" in done.stderr

    done = run(binade, "compare", **options)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert "binade[app]" in done.stderr


@pytest.mark.thorough
def test_instruments_next_to_modules_of_our_names(core, user, tmp_path):
    (user / "train.py").write_text(INSTRUMENTED)
    done = run(core, "train.py", tmp_path / "runs", cwd=user)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(core.parents[1])
    (status,) = tmp_path.glob("runs/*/status.json")
    assert json.loads(status.read_text())["tensors"] > 0


@pytest.mark.thorough
def test_serves_with_the_app_extra(wheel, user, tmp_path):
    python = environment(tmp_path / "environment", *CORE, *EXTRA)
    pip(python, "install", "--no-deps", wheel)
    port = free_port()
    with (tmp_path / "log").open("w") as log:
        app = subprocess.Popen(
            [python, "-m", "binade", "serve", "--port", str(port)],
            cwd=user,
            env={**os.environ, "TENSOR_SAVE_DIR": str(tmp_path / "runs")},
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            until(lambda: answers(app.pid, f"http://127.0.0.1:{port}"), "the app to answer")
        finally:
            app.terminate()
            app.wait(timeout=30)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("torch", "installs"), [("2.9.0", ["binade"]), ("2.9.1+cu128", ["binade"]), ("2.8.0", None)])
def test_install_leaves_torch_as_it_is(wheel, tmp_path, torch, installs):
    """The resolver's own report, in an environment that claims a torch and the lowest versions of everything else."""
    python = environment(tmp_path / "environment", Requirement("pip"))
    (packages,) = (tmp_path / "environment").glob("lib/python*/site-packages")
    for requirement in CORE:
        (bound,) = requirement.specifier
        version = torch if requirement.name == "torch" else bound.version
        info = packages / f"{requirement.name.replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {requirement.name}\nVersion: {version}\n")
    offline = {name: value for name, value in os.environ.items() if not name.startswith("PIP_")}
    command = (python, "-m", "pip", "install", "--no-index", "--dry-run", "--quiet", "--report", "-", wheel)
    done = run(*command, env={**offline, "PIP_CONFIG_FILE": os.devnull})
    if installs is None:
        assert done.returncode == 1 and "torch>=2.9" in done.stderr  # the resolver does look
    else:
        assert [item["metadata"]["name"] for item in json.loads(done.stdout)["install"]] == installs


@pytest.mark.thorough
def test_editable_install(source, user, tmp_path):
    """An edit is seen at once, and `import app` does not become ours."""
    python = environment(tmp_path / "environment", *CORE, Requirement("setuptools"))
    pip(python, "install", "--no-deps", "--no-build-isolation", "-e", source)
    done = run(python.with_name("binade"), "--help", cwd=user)
    assert done.returncode == 0 and "quick" in done.stdout
    done = run(python, "-c", "import binade.quant; print(binade.quant.__file__); import app", cwd="/")
    assert Path(done.stdout.strip()) == source / "binade/quant/__init__.py"
    assert "No module named 'app'" in done.stderr
