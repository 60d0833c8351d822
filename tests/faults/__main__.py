"""Plant faults in the code and count how many the tests find.

    python -m tests.faults map --part quant               which tests execute which line; minutes
    python -m tests.faults plant --part quant --seed 1    plant faults in lines that tests execute, and run these tests

`map` runs tests/quant under coverage (`pip install coverage`) and writes build/faults/quant.json. More arguments are
pytest's: `map --part app --chunk slow -m slow` writes app-slow.json; `map --part data --chunk app tests/app` maps
other tests. Only what runs in pytest's own process counts. Ctrl-C keeps what has been recorded.

`plant` copies the tree, plants one fault at a time there and runs the tests that execute its line by all maps of the
part, the quickest file first, until one fails. --save writes the faults to a file. `plant --from FILE` plants them in a
later version of the code, where a fault is gone if its function no longer has the statement.

It prints a row per fault: place, kind, change, number of tests that execute the line (and that --seconds lets run), the
test that failed, and seconds; then totals per part. A fault that is not found is either equivalent, which means that no
input shows it, or a gap in the tests.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import random
import shutil
import subprocess
import sys
import time
from collections import Counter
from dataclasses import asdict
from importlib import import_module
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from textwrap import shorten

from tests.faults.fault import Fault, Kind, faults_of
from tests.faults.pytest_run import FOLDERS, FirstFailure, Lines
from tests.siege.__main__ import contained, end_descendants

MISSED, GONE = "not found", "gone"


class Maps:
    """Which tests execute which line of a part, as `map` has recorded it."""

    def __init__(self, folder: Path, part: str) -> None:
        paths = sorted(folder.glob(f"{part}*.json"))
        maps = [json.loads(path.read_text()) for path in paths]
        self.time = min((path.stat().st_mtime for path in paths), default=0.0)
        self.modules = {module for recorded in maps for module in recorded["modules"]}
        self.maps = [(list(recorded["seconds"].items()), recorded["lines"]) for recorded in maps]

    def tests(self, fault: Fault) -> dict[str, float]:
        """The tests that execute a fault's line, with their seconds."""
        if Path(fault.file).stat().st_mtime > self.time:
            sys.exit(f"there is no map of the present {fault.file}: run `map`")
        numbers = ((tests, lines.get(fault.file, {}).get(str(fault.line), ())) for tests, lines in self.maps)
        return dict(tests[number] for tests, executed_by in numbers for number in executed_by)


def main() -> None:
    parser = argparse.ArgumentParser("python -m tests.faults", description=__doc__.splitlines()[0])
    parser.add_argument("mode", choices=("map", "plant"))
    parser.add_argument("--part", choices=FOLDERS, help="`plant` without it plants faults in all")
    parser.add_argument("--maps", type=Path, default=Path("build/faults"), help="folder of maps")
    parser.add_argument("--chunk", default="", help="end of the map's name, where a part has several")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--faults", type=int, default=10, help="number per part")
    parser.add_argument("--seconds", type=float, default=120, help="of tests per fault, by the times of the map")
    parser.add_argument("--save", type=Path, help="write the faults to this file")
    parser.add_argument("--from", type=Path, dest="file", help="plant the faults of this file")
    options, pytest_options = parser.parse_known_args()
    parts = [options.part] if options.part else FOLDERS
    if options.mode == "map":
        tests = [] if any(Path(option).exists() for option in pytest_options) else [f"tests/{options.part}"]
        options.maps.mkdir(parents=True, exist_ok=True)
        name = "-".join(filter(None, (options.part, options.chunk)))
        sys.exit(Lines().run(options.maps / f"{name}.json", *tests, *pytest_options))
    maps = {part: Maps(options.maps, part) for part in parts}
    if options.file:
        faults = [fault for entry in json.loads(options.file.read_text()) if (fault := Fault(**entry)).part in parts]
    else:
        faults = [fault for part in parts for fault in choose(part, maps[part], options.seed, options.faults)]
    if options.save:
        options.save.write_text(json.dumps([asdict(fault) for fault in faults], indent=1))
    for module in {module for part in parts for module in maps[part].modules}:
        import_module(module)  # once, before the tests of each fault run in a fork
    print("| fault | kind | change | tests | found by | seconds |\n|---|---|---|---|---|---|", flush=True)
    totals: Counter[str] = Counter()
    with contained() as place:
        copy_tree(place / "tree")
        for fault in faults:
            started = time.monotonic()
            tests, result = plant(place / "tree", fault, maps[fault.part], options.seconds)
            texts = (shorten(text, 90) for text in (fault.statement, fault.before, fault.after))
            change = "`{}`: `{}` → `{}`".format(*texts).replace("|", "\\|")
            row = f"{fault.file}:{fault.line} {fault.function}", fault.kind, change, tests, result
            print("|", *(f"{cell} |" for cell in row), f"{time.monotonic() - started:.0f} |", flush=True)
            totals[f"{fault.part}: {result if result in (MISSED, GONE) else 'found'}"] += 1
    print("", *(f"{result} {number}" for result, number in sorted(totals.items())), sep="\n")


def choose(part: str, maps: Maps, seed: int, number: int) -> list[Fault]:
    """Random faults in lines that tests execute, in turn of each kind, no two in a line."""
    files = sorted(Path(part).rglob("*.py"))
    faults = [fault for file in files for fault in faults_of(str(file), file.read_bytes()) if maps.tests(fault)]
    random.Random(f"{seed} {part}").shuffle(faults)
    chosen: dict[tuple[str, int], Fault] = {}
    while len(chosen) < number:
        kind = list(Kind)[len(chosen) % len(Kind)]
        fault = next(fault for fault in faults if fault.kind == kind and (fault.file, fault.line) not in chosen)
        chosen[fault.file, fault.line] = fault
    return list(chosen.values())


def copy_tree(tree: Path) -> None:
    """Copy the files that git does not ignore."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    for name in filter(os.path.lexists, subprocess.check_output(command, text=True).split("\0")):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(name, tree / name, follow_symlinks=False)


def plant(tree: Path, fault: Fault, maps: Maps, seconds: float) -> tuple[str, str]:
    """Plant a fault and run its tests: their number, and the first failure, MISSED or GONE."""
    path = Path(fault.file)
    source = path.read_bytes() if path.exists() else b""
    same = next((other for other in faults_of(fault.file, source) if other == fault), None)
    if not same:
        return "", GONE
    tests = maps.tests(same)
    chosen = quickest(tests, seconds)
    (tree / path).write_bytes(same.planted(source))
    failure = first_failure(tree, chosen, 120 + 5 * sum(tests[test] for test in chosen)) if chosen else ""
    (tree / path).write_bytes(source)
    return f"{len(chosen)} of {len(tests)}" if len(chosen) < len(tests) else f"{len(tests)}", failure or MISSED


def quickest(tests: dict[str, float], seconds: float) -> list[str]:
    """Tests for some seconds, at least one: first the file whose tests take the least time."""
    files: Counter[str] = Counter()
    for test, duration in tests.items():
        files[test.partition("::")[0]] += duration
    ordered = sorted(tests, key=lambda test: files[test.partition("::")[0]])
    times = accumulate(tests[test] for test in ordered)
    return [test for test, time in zip(ordered, times, strict=True) if time <= seconds] or ordered[:1]


def first_failure(tree: Path, tests: list[str], seconds: float) -> str:
    """The first of some tests that fails in a tree, or what else went wrong; empty if nothing did."""
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_run, args=(tree, tests, sender))
    process.start()
    sender.close()
    try:
        return receiver.recv() if receiver.poll(seconds) else f"took more than {seconds:.0f} s"
    except EOFError:
        return "crashed"
    finally:
        end_descendants(os.getpid())
        process.join()


def _run(tree: Path, tests: list[str], sender: Connection) -> None:
    sys.path[:] = [str(tree) if path == os.getcwd() else path for path in sys.path]
    for name in [name for name in sys.modules if name.partition(".")[0] in ("binade", "tests")]:
        del sys.modules[name]
    os.chdir(tree)
    os.environ["PYTHONPATH"] = str(tree)
    null = os.open(os.devnull, os.O_RDWR)
    for stream in (1, 2):
        os.dup2(null, stream)
    plugin = FirstFailure(tests)
    status = plugin.run()
    sender.send(plugin.failed or (f"pytest: exit status {status}" if status else ""))


if __name__ == "__main__":
    main()
