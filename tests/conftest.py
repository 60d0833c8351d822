"""Shared by all tests: real runs, collected once by the real command; one thread per process; what `make test` leaves
out."""

from __future__ import annotations

import gc
import itertools
import json
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from filelock import FileLock

from tests.template import Fork

if TYPE_CHECKING:
    from binade.data.index.catalog import Catalog

# Before torch is imported, and for every process that a test starts: tensors here are too small to share.
os.environ["OMP_NUM_THREADS"] = "1"

try:
    from hypothesis import settings
except ImportError:  # where only kernels are run
    pass
else:
    # The same examples in every run; --hypothesis-profile=default looks for new ones.
    settings.register_profile("same", derandomize=True, database=None, deadline=None)
    settings.load_profile("same")

PROJECT = Path(__file__).parents[1]
Done = subprocess.CompletedProcess[str]
MadeOnce = Callable[[str, Callable[[Path], None]], Path]
RECIPES = ("bf16", "hifp8", "mxfp8", "mxfp4")
SPENT = pytest.StashKey[float]()  # processor seconds of this process up to its last report
COLLECTION = pytest.StashKey[float]()  # those up to its first test, until a report has them
ALL_SLOW = re.compile(r"^pytestmark = .*pytest\.mark\.slow", re.MULTILINE)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where slow tests are left out, files of nothing else are not imported, which takes as long as many a test."""
    chosen = "not slow" in config.option.markexpr and collection_path.suffix == ".py"
    return True if chosen and ALL_SLOW.search(collection_path.read_text()) else None


def pytest_configure() -> None:
    gc.disable()  # until collection has imported everything


def pytest_collection_finish(session: pytest.Session) -> None:
    """A million objects of modules and tests, which stay, are left out of each garbage collection."""
    gc.freeze()
    gc.enable()
    session.config.stash[SPENT] = session.config.stash[COLLECTION] = _processor_seconds()


def _processor_seconds() -> float:
    """Seconds that cores have worked for this process and its processes that have ended, in user and system mode."""
    return sum(os.times()[:4])


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Give each report the processor time since the last one, as wall time depends on what else the machine does, and
    the first one that of imports and collection."""
    report = yield
    stash = item.config.stash
    before, stash[SPENT] = stash[SPENT], _processor_seconds()
    report.processor_seconds = stash[SPENT] - before
    report.collection_seconds, stash[COLLECTION] = stash[COLLECTION], 0.0
    return report


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the processor time of collection in all workers, and of each folder of tests with its slowest file."""
    seconds: dict[str, Counter[str]] = defaultdict(Counter)
    collection = 0.0
    for report in itertools.chain.from_iterable(terminalreporter.stats.values()):
        if isinstance(report, pytest.TestReport):
            folder, _, file = report.nodeid.partition("::")[0].rpartition("/")
            seconds[folder][file] += report.processor_seconds
            collection += report.collection_seconds
    if seconds:
        terminalreporter.section("processor time")
        terminalreporter.write_line(f"{collection:7.1f} s  imports and collection")
    for folder, files in sorted(seconds.items()):
        ((slowest, most),) = files.most_common(1)
        terminalreporter.write_line(f"{files.total():7.1f} s  {folder:24} {slowest} {most:.1f} s")


def pytest_unconfigure() -> None:
    gc.unfreeze()  # what lives in C++ is taken down with the rest at the end


@pytest.hookimpl(tryfirst=True)  # before -m deselects
def pytest_collection_modifyitems(items: list[pytest.Item], config: pytest.Config) -> None:
    """Mark as thorough what `sampled` tests leave out: all cases but n, evenly spread, or without n, all but so many
    that each word of their ids occurs. Where thorough tests are left out, hypothesis tries a third of the examples."""
    if "not thorough" in config.option.markexpr:
        for test in {item.function for item in items if hasattr(getattr(item, "function", None), "hypothesis")}:
            own = test._hypothesis_internal_use_settings
            test._hypothesis_internal_use_settings = settings(own, max_examples=own.max_examples // 3)
    sampled = [item for item in items if item.get_closest_marker("sampled")]
    for _, group in itertools.groupby(sampled, lambda item: item.nodeid.partition("[")[0]):
        cases = list(group)
        for item in set(cases) - set(_sample(cases, *cases[0].get_closest_marker("sampled").args)):
            item.add_marker("thorough")


def _sample(cases: list[pytest.Item], count: int | None = None) -> list[pytest.Item]:
    if count is not None:
        return cases[:: math.ceil(len(cases) / count)]
    words = {item: set(re.findall(r"[^-(), \[\]]+", item.nodeid.partition("[")[2])) for item in cases}
    chosen: list[pytest.Item] = []
    seen: set[str] = set()
    while not words[newest := max(cases, key=lambda item: len(words[item] - seen))] <= seen:
        seen |= words[newest]
        chosen.append(newest)
    return chosen


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """A shell that starts pytest in the background has it ignore SIGINT, and every process of a test with it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _signals() -> Iterator[None]:
    """binade in this process catches signals, and ignores them after the first: the processes of later tests would."""
    before = {signum: signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)}
    hook = sys.unraisablehook
    yield
    for signum, handler in before.items():
        signal.signal(signum, handler)
    sys.unraisablehook = hook


def start_python(*arguments: str | Path, env: Mapping[str, str] | None = None, **options) -> subprocess.Popen[str]:
    """This Python with arguments, in the project's directory, its output in pipes; env is beside what is set here."""
    usual = {"cwd": PROJECT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.Popen(command, env={**os.environ, **(env or {})}, **usual | options)


def start_binade(
    *arguments: str | Path, root: Path | None = None, env: Mapping[str, str] | None = None, **options
) -> subprocess.Popen[str]:
    """binade with arguments, on a root, its output in pipes: a fork of `template`. With env, which a module may read
    when it is imported and which may be empty, it is the true command."""
    place = {"TENSOR_SAVE_DIR": str(root)} if root else {}
    if env is not None:
        return start_python("-m", "binade", *arguments, env={**place, **env}, **options)
    usual = {"cwd": PROJECT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return Fork(list(map(str, arguments)), env={**os.environ, **place}, **usual | options)


def run_python(*arguments: str | Path, timeout: float = 1200, **options) -> Done:
    """What start_python starts, after its end."""
    return ended(start_python(*arguments, **options), timeout)


def run_collector(*arguments: str, root: Path, timeout: float = 1200, **options) -> Done:
    """What start_binade starts, after its end."""
    return ended(start_binade(*arguments, root=root, **options), timeout)


def ended(started: subprocess.Popen[str], timeout: float = 1200) -> Done:
    """A process after its end. The time is that of a machine with much else to do: a process that hangs is killed."""
    with started as process:
        try:
            output, error = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
    return Done(process.args, process.returncode, output, error)


def until(condition: Callable[[], object], what: str, seconds: float = 120) -> None:
    """Wait for a condition; fail if it does not come about."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited in vain for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="session")
def made_once(tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """made_once(name, make): a directory that make(directory) has filled, in one of the workers, for all of them."""
    own = tmp_path_factory.getbasetemp()

    def place_of(name: str, make: Callable[[Path], None]) -> Path:
        place = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name
        with FileLock(f"{place}.lock"):
            if not place.exists():
                partial = place.with_name(f"{name}.part")
                partial.mkdir()
                make(partial)
                partial.rename(place)
        return place

    return place_of


@pytest.fixture(scope="session")
def root_once(made_once: MadeOnce, tmp_path_factory: pytest.TempPathFactory) -> MadeOnce:
    """root_once(name, make): this worker's copy of `made_once`: only one process at a time can own a root's index. Its
    files are links."""

    def copy_of(name: str, make: Callable[[Path], None]) -> Path:
        own = tmp_path_factory.mktemp(name) / "runs"
        return shutil.copytree(made_once(name, make), own, copy_function=os.link)

    return copy_of


def collect_recipes(root: Path) -> None:
    """Fill a root with one run of each of RECIPES."""
    done = run_collector(
        "batch", "--quantization", ",".join(RECIPES), "--backend", "torch", "--training-config", "fast",
        "--warmup-iterations", "2", "--control-iter", "2", root=root,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="session")
def collected(root_once: MadeOnce) -> Path:
    """A root with one run of each of RECIPES: tiny, 2 layers, 2 recorded iterations of 128 tokens. Read only.

    Torch quantizes, as the interpreter takes twice the time for the same bits (tests/collector/test_training.py).
    """
    return root_once("collected", collect_recipes)


@pytest.fixture(scope="session")
def measured_root(root_once: MadeOnce, collected: Path) -> Path:
    """The bf16 run of `collected`, with the effects of its groups of linear layers in three formats. Read only."""

    def measure(root: Path) -> None:
        (run,) = (each for each in collected.glob("*/run.json") if json.loads(each.read_text())["recipe"] == "bf16")
        shutil.copytree(run.parent, root / run.parent.name)
        done = run_collector(
            "measure", run.parent.name, "--formats", "mxfp4,nvfp4,mxfp8", "--by", "part,site,layer,module",
            "--sequences", "4", root=root,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    return root_once("measured", measure)


@pytest.fixture(scope="module")
def catalog(collected: Path) -> Iterator[Catalog]:
    """The catalog of the collected runs."""
    from binade.data.index.catalog import Catalog  # not where only kernels are run

    with Catalog.open(collected) as opened:
        yield opened


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., int]:
    """binade in this process, on the root tmp_path/"runs": its exit status."""
    monkeypatch.setenv("TENSOR_SAVE_DIR", str(tmp_path / "runs"))

    from binade.cli import main  # not where only kernels are run

    def call(*arguments: str) -> int:
        try:
            return main(arguments)
        except SystemExit as end:
            return end.code

    return call


@pytest.fixture
def small_disk(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Path]:
    """A tmpfs of the size that the test asks for."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={request.param}", "tmpfs", str(place)]
    try:
        done = subprocess.run(mount, capture_output=True, text=True)
    except FileNotFoundError:
        pytest.skip("there is no mount command")
    if done.returncode:
        pytest.skip(f"a tmpfs cannot be mounted here: {done.stderr.strip()}")
    yield place
    unmount = ["umount", str(place)]  # a process that was told to end may be on its way
    until(lambda: subprocess.run(unmount, capture_output=True).returncode == 0, f"the processes that use {place}")
