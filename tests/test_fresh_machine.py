"""README's promises to a newcomer: its commands work with what it asks for, and nothing else is on the machine."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import bare_path
from tests.browser.driver import answers, free_port
from tests.conftest import PROJECT, until
from tests.test_packaging import copy_project

README = (PROJECT / "README.md").read_text()
SECTION = README.partition("## Install and run\n")[2].partition("\n## ")[0]
USES_COMPILER = re.compile(r"native\.(built|compiler)\(|\"c\+\+\"")


def test_what_depends_on_a_compiler_is_marked():
    """So that .ci/run finds it. The files of benchmarks and of the GPU are no part of `make test`."""
    files = [path for path in (PROJECT / "tests").rglob("test_*.py") if path.parent.name not in ("bench", "gpu")]
    naming = {path for path in files if USES_COMPILER.search(path.read_text())} - {Path(__file__)}
    marked = {path for path in files if "mark.compiler" in path.read_text()} - {Path(__file__)}
    assert {path.name for path in naming} >= {"test_counts.py", "test_cpu.py", "test_fake_cuda.py"}
    assert naming - marked == {PROJECT / "tests" / "test_input_first.py"}  # with programs of its own


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if not shutil.which("dpkg-query"):
        pytest.skip("dpkg-query, which knows what every Debian has, is not on this machine")
    folder = tmp_path_factory.mktemp("machine") / "bin"
    bare_path.fill(folder)
    return folder


def test_the_path_of_a_new_machine_has_what_readme_names(bare: Path):
    (packages,) = re.findall(r"`apt-get install ([^`]+)`", SECTION)
    assert packages.split() == ["python3-venv", *(name for name in bare_path.README if name != "python3")]
    programs = {name for name in os.listdir(bare) if shutil.which(name, path=bare)}
    assert programs >= {*bare_path.README, "sh", "awk", "sed", "getconf", "mktemp", "apt-get"}
    absent = {"c++", "g++", "cc", "gcc", "ip", "nginx", "sbatch", "curl", "node", "pip", "uv", "perl5"}
    assert not programs & absent
    done = subprocess.run(["python3", "-c", "import venv"], env={"PATH": str(bare)})
    assert done.returncode == 0


@pytest.fixture(scope="module")
def newcomer(bare: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A copy of the project, and the environment of a shell that has nothing else. Where pip finds packages stays."""
    place = tmp_path_factory.mktemp("newcomer")
    (place / "home").mkdir()
    copy = copy_project(place / "binade")
    subprocess.run(["git", "init", "--quiet"], cwd=copy, check=True)
    subprocess.run(["git", "add", "--all"], cwd=copy, check=True)
    kept = {name: value for name, value in os.environ.items() if re.match(r"PIP_|SSL_|\w+_proxy$", name, re.I)}
    return copy, kept | {"PATH": str(bare), "HOME": str(place / "home"), "TMPDIR": str(place)}


def command(pattern: str) -> str:
    """A command of README's section."""
    (found,) = re.findall(rf"(?:^    |`)({pattern})(?= +#|`)", SECTION, re.M)
    return found


@pytest.mark.slow
@pytest.mark.thorough
class TestCommands:
    """Typed as they stand there, only the port and the tests being chosen."""

    @pytest.fixture
    def served(self, newcomer: tuple[Path, dict[str, str]], tmp_path: Path) -> Iterator[tuple[int, int, Path]]:
        copy, environment = newcomer
        port = free_port()
        assert command("make run")
        line = command(r"PORT=\d+ make run").replace("8600", str(port))
        with (tmp_path / "log").open("w") as log:
            shell = subprocess.Popen(
                ["sh", "-c", line], cwd=copy, env=environment, stdout=log, stderr=log, start_new_session=True
            )
            try:
                yield shell.pid, port, tmp_path / "log"
            finally:
                os.killpg(shell.pid, signal.SIGTERM)
                shell.wait(60)

    def test_make_run(self, served: tuple[int, int, Path], newcomer: tuple[Path, dict[str, str]]):
        pid, port, log = served
        until(lambda: "Binade: http" in log.read_text() or not alive(pid), "make run to serve", 1800)
        assert f"Binade: http://127.0.0.1:{port}" in log.read_text(), log.read_text()[-3000:]
        until(lambda: answers(pid, f"http://127.0.0.1:{port}"), "the app to answer")
        assert len(list((newcomer[0] / "data/runs").glob("*/run.json"))) == 8  # as the comment beside it says
        assert re.search(r"make run +# .*eight small runs", SECTION)

    def test_make_test(self, newcomer: tuple[Path, dict[str, str]]):
        copy, environment = newcomer
        line = f"{command('make test')} ARGS={shlex.quote('tests/data/test_filter.py tests/browser/test_palette.py')}"
        done = subprocess.run(
            ["sh", "-c", line], cwd=copy, env=environment, capture_output=True, text=True, timeout=1800
        )
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        assert re.search(r"\d+ passed", done.stdout.splitlines()[-1])


def alive(pid: int) -> bool:
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
