"""Two pytest plugins: one records which lines each test executes, one runs tests until the first failure."""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

FOLDERS = ("quant", "data", "collector", "app")
# What takes longest to import.
MODULES = ("torch", "duckdb", "pandas", "pyarrow.parquet", "streamlit.testing.v1", "altair", "scipy.stats")
OPTIONS = ("-p", "no:cacheprovider", "--tb=no", "--disable-warnings")


class Lines:
    """Records lines with coverage's contexts.

    A context is a test, or a fixture of a wider scope: every test that uses the fixture executes its lines.
    """

    def __init__(self) -> None:
        try:
            from coverage import Coverage
        except ImportError:
            sys.exit("`map` needs coverage: pip install coverage")
        self.coverage = Coverage(data_file=None, config_file=False, source=FOLDERS)
        self.context = ""
        self.users: defaultdict[str, set[str]] = defaultdict(set)  # of a context: tests
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.failed: set[str] = set()

    @contextmanager
    def _in_context(self, context: str) -> Iterator[None]:
        outer, self.context = self.context, context
        self.coverage.switch_context(context)
        yield
        self.context = outer
        self.coverage.switch_context(outer)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        with self._in_context(item.nodeid):
            return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: pytest.FixtureDef) -> Generator[None, object, object]:
        wide = fixturedef.scope != "function"
        with self._in_context(f"{fixturedef.baseid} {fixturedef.argname}" if wide else self.context):
            return (yield)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            self.users[item.nodeid].add(item.nodeid)
            for *_, fixture in item._fixtureinfo.name2fixturedefs.values():
                self.users[f"{fixture.baseid} {fixture.argname}"].add(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.seconds[report.nodeid] += report.duration
        if not report.passed:
            self.failed.add(report.nodeid)

    def run(self, output: Path, *arguments: str) -> int:
        """Write {"seconds": {test: seconds}, "modules": [of MODULES], "lines": {file: {line: [test]}}}.

        In "lines" are the tests that pass, by their number in "seconds". The exit status is pytest's.
        """
        self.coverage.start()
        status = pytest.main([*OPTIONS, *arguments], plugins=[self])
        self.coverage.stop()
        data = self.coverage.get_data()
        numbers = {test: number for number, test in enumerate(self.seconds) if test not in self.failed}
        lines: defaultdict[str, dict[int, list[int]]] = defaultdict(dict)
        for file in data.measured_files():
            for line, contexts in data.contexts_by_lineno(file).items():
                tests = {test for context in contexts for test in self.users[context]}
                lines[os.path.relpath(file)][line] = sorted(numbers[test] for test in tests if test in numbers)
        modules = [name for name in MODULES if name in sys.modules]
        output.write_text(json.dumps({"seconds": self.seconds, "modules": modules, "lines": lines}))
        return status


class FirstFailure:
    """Runs tests in their order until one fails; `failed` is its name."""

    def __init__(self, tests: list[str]) -> None:
        self.order = {test: number for number, test in enumerate(tests)}
        self.failed = ""

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        chosen = [item for item in items if item.nodeid in self.order]
        items[:] = sorted(chosen, key=lambda item: self.order[item.nodeid])

    def pytest_runtest_logreport(self, report: pytest.CollectReport | pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self.failed = report.nodeid

    pytest_collectreport = pytest_runtest_logreport

    def run(self) -> int:
        files = dict.fromkeys(test.partition("::")[0] for test in self.order)
        return pytest.main([*OPTIONS, "-x", *files], plugins=[self])
