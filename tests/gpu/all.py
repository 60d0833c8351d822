"""Everything that needs a GPU, part by part.

    bash tests/gpu/all.sh [--output FOLDER] [--part NAME ...]     what docs/gpu.md describes
    bash tests/gpu/all.sh --device cpu                            every part at a tiny size: proves the script alone

Each part is a process with a time limit of its own. Its result is kept in FOLDER/results.json as soon as it ends, and
all of them in FOLDER/results.md. A part that passed with the same sources on the same device is skipped, so that the
same command does later what is left. Exit status: 0 all parts passed; 1 a part failed or is left; 2 no CUDA device,
or bad usage; 130 interrupted.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).parents[2]
TIME = 540.0  # seconds for all parts
LEAST = 15.0  # no part is started with less left
ENDING = 20.0  # for what a part says when it is stopped
CORE = {  # what the collector imports besides torch, by the name that pip knows
    "click": "click", "filelock": "filelock", "re2": "google-re2", "numpy": "numpy", "psutil": "psutil",
    "pyarrow": "pyarrow", "pydantic": "pydantic", "safetensors": "safetensors", "tqdm": "tqdm",
}  # fmt: skip
Row = dict[str, str]


@dataclass(frozen=True)
class Part:
    """limit: seconds. needs: packages by import name. headline: the one figure of its tables, in words."""

    name: str
    what: str
    limit: float
    cuda: tuple[str, ...]
    cpu: tuple[str, ...]
    needs: tuple[str, ...] = tuple(CORE)
    headline: Callable[[list[Row]], str] = lambda rows: ""


def gpu_test_files() -> list[str]:
    """Those whose tests take a device."""
    takes = re.compile(r"^from tests\S* import .*\bdevices\b|mark\.gpu\b", re.M)
    paths = sorted(PROJECT.glob("tests/**/test_*.py"))
    return [str(path.relative_to(PROJECT)) for path in paths if takes.search(path.read_text())]


def _pytest(*arguments: str) -> tuple[str, ...]:
    side_by_side = ("-n", str(min(12, os.cpu_count() or 1))) if find_spec("xdist") else ()
    return ("pytest", "-q", "--durations=12", "-p", "no:cacheprovider", "--tb=short", *side_by_side, *arguments)


def _ratios(rows: list[Row]) -> str:
    kinds: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for row in rows:
        kinds["stochastic" in row["format"]].append((float(row["ratio"]), f"{row['format']}, {row['axis']} axis"))
    lowest = {key: min(found) for key, found in kinds.items() if found}
    words = {False: "to nearest (goal 0.90)", True: "stochastic (goal 0.75)"}
    return "; ".join(f"least of a copy {words[key]}: {value:.2f}, {name}" for key, (value, name) in lowest.items())


def _step(rows: list[Row]) -> str:
    for row in rows:
        if "scores" in row["step"]:
            goals = f"{row['of a bare step']} of a bare step (goal 1.5), {row['every 20th']} every 20th (goal 1.03)"
            return f"{row['step']}: {goals}"
    return ""


def _launches(rows: list[Row]) -> str:
    found = [row for row in rows if row["step"] == "defaults"]
    return "; ".join(f"{row['layer']}: {row['of bare']} of bare, {row['launches']} launches" for row in found)


def _train(rows: list[Row]) -> str:
    ratios = [float(row["of bf16"]) for row in rows if "bf16" not in row["recipe"]]
    return f"at most {max(ratios):.2f} of bf16 (goal 1.25)" if ratios else ""


MEASURE = ("tests.gpu.measure",)
PARTS = (
    Part("device", "versions, device, the rate of a copy", 60, (*MEASURE, "device"), (*MEASURE, "device"), ("numpy",)),
    Part(
        "tests", "kernels to the bit, both axes; nothing waits; graphs; torch.compile", 300,
        _pytest("-m", "gpu", *gpu_test_files()),
        ("pytest", "-q", "-p", "no:cacheprovider", "-k", "test_graph and mxfp8", "tests/gpu/test_graphs.py"),
        (*CORE, "pytest", "scipy", "hypothesis", "ml_dtypes"),
    ),
    Part(
        "launches", "a recorded layer of an 8B model: time, launches, memory", 90,
        ("tests.bench.bench_launches",), ("tests.bench.bench_launches", "--tokens", "64", "--only", "linear"),
        headline=_launches,
    ),
    Part(
        "quantize", "every spec against a copy", 150, (*MEASURE, "quantize"), (*MEASURE, "quantize"), ("numpy",),
        _ratios,
    ),
    Part(
        "step", "a step bare, with hooks, recorded", 90,
        (
            "tests.bench.bench_step", "--full", "--layers", "1", "--sequence-length", "2048", "--rounds", "3",
            "--only", "hooks|Triton|statistics|scores|blocks|loss changes",  # without gigabytes of values
        ),
        ("tests.bench.bench_step", "--layers", "1", "--rounds", "1", "--only", "hooks: min|recorded: stat"),
        headline=_step,
    ),
    Part(
        "train", "one layer of each model at full width, time and peak memory", 90,
        (*MEASURE, "train"), (*MEASURE, "train"), headline=_train,
    ),
    Part(
        "collect", "ten recipes, llama32-1b of 4 layers at full width", 150,
        (*MEASURE, "collect"), (*MEASURE, "collect"),
    ),
    Part("ranks", "two ranks on the device, against one", 60, (*MEASURE, "ranks"), (*MEASURE, "ranks")),
)  # fmt: skip


def sources() -> str:
    """Of the code that is measured: a copy of the working tree need not have git's directory."""
    digest = hashlib.sha256()
    for folder in ("quant", "data", "collector", "binade", "tests/gpu", "tests/bench", "tests/quant"):
        for path in sorted((PROJECT / folder).rglob("*.py")):
            digest.update(path.relative_to(PROJECT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()[:12]


def commit() -> str:
    found = subprocess.run(["git", "describe", "--always", "--dirty"], cwd=PROJECT, capture_output=True, text=True)
    return found.stdout.strip() or "unknown"


def tables(output: str) -> list[Row]:
    """The rows of all Markdown tables in a text."""
    rows: list[Row] = []
    names: list[str] | None = None
    for line in output.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        if not line.startswith("|"):
            names = None
        elif names is None:
            names = cells
        elif not set(line) <= set("|-: "):
            rows.append(dict(zip(names, cells, strict=False)))
    return rows


def run(part: Part, device: str, limit: float, scratch: Path) -> dict[str, Any]:
    """The result of a part's process, whose whole group is ended after `limit` seconds."""
    command = [sys.executable, "-m", *(part.cuda if device == "cuda" else part.cpu)]
    if "pytest" not in command:
        command += ["--device", device]
    environment = {
        **os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(PROJECT), os.environ.get("PYTHONPATH")))),
        "PYTHONUNBUFFERED": "1", "TRITON_CACHE_DIR": str(scratch / "triton"),
        "BINADE_CACHE_DIR": str(scratch / "builds"),
    }  # fmt: skip
    if device == "cpu":
        environment["CUDA_VISIBLE_DEVICES"] = ""
    start = time.monotonic()
    log = scratch / f"{part.name}.log"
    with log.open("w+") as stream:
        process = subprocess.Popen(
            command, cwd=PROJECT, env=environment, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            status = "passed" if process.wait(limit) == 0 else f"failed with exit status {process.returncode}"
        except subprocess.TimeoutExpired:
            status = f"stopped after {limit:.0f} s"
            process.send_signal(signal.SIGINT)  # pytest then says what has failed so far
            with suppress(subprocess.TimeoutExpired):
                process.wait(ENDING)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()
    output = log.read_text(errors="replace")
    rows = tables(output)
    return {
        "status": status, "date": f"{datetime.now():%Y-%m-%d %H:%M}", "seconds": round(time.monotonic() - start, 1),
        "command": shlex.join(["python", *command[1:]]), "rows": rows, "output": output[-20_000:],
        "headline": headline(part, rows, output) if device == "cuda" else "measures nothing",
    }  # fmt: skip


def headline(part: Part, rows: list[Row], output: str) -> str:
    """The part's figure; of a part without one, or that ended before it was known, the last line of its output."""
    try:
        found = part.headline(rows)
    except (KeyError, ValueError):
        found = ""
    last = output.strip().splitlines()[-1:]
    return (found or "".join(last)).replace("|", "/")[:200]


def report(results: dict[str, Any], about: str) -> str:
    """All results as Markdown: a line for each part, then their tables as they printed them."""
    columns = ("status", "headline", "seconds", "date", "device", "command")
    lines = [f"# GPU results\n\n{about}\n", f"| part | {' | '.join(columns)} |", "|---" * 7 + "|"]
    lines += [
        f"| {name} | {' | '.join(str(one[key]).replace('|', '/') for key in columns)} |"
        for name, one in results.items()
    ]
    for name, one in results.items():
        if one["rows"]:
            printed = [line for line in one["output"].splitlines() if line.startswith("|") or not line]
            lines += [f"\n## {name}\n", "\n".join(printed).strip()]
    return "\n".join(lines) + "\n"


def write(path: Path, text: str) -> None:
    staged = path.with_name(f".{path.name}.new")
    staged.write_text(text)
    staged.replace(path)


def device_name(device: str) -> str | None:
    """None without the device. In a process of its own: this one keeps no context on the GPU."""
    if device == "cpu":
        return "cpu: a tiny run that proves the script and measures nothing"
    program = "import torch; print(torch.cuda.get_device_name() if torch.cuda.is_available() else '')"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    if found.returncode:
        sys.exit(f"gpu: {sys.executable} cannot import torch: name the training environment's Python by PYTHON=")
    return found.stdout.strip() or None


def install_hint(missing: set[str]) -> str:
    names = " ".join(sorted(CORE.get(name, name) for name in missing))
    return (
        f"{sys.executable} lacks {names}: {sys.executable} -m pip install {names}; without a network, pip download "
        "them elsewhere, pip install --no-index --target DIR here, and set PYTHONPATH=DIR"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--output", type=Path, default=PROJECT / "build/gpu", help="folder of the results")
    parser.add_argument("--part", action="append", choices=[part.name for part in PARTS], help="only these")
    parser.add_argument("--time", type=float, help="seconds for all parts; 540 on CUDA by default")
    args = parser.parse_args()
    if (device := device_name(args.device)) is None:
        print("gpu: torch sees no CUDA device here; --device cpu proves the script alone", file=sys.stderr)
        return 2
    patience = 1 if args.device == "cuda" else 10  # a busy machine that only proves the script may take its time
    end = time.monotonic() + (TIME * patience if args.time is None else args.time)
    version, scratch = sources(), args.output.resolve() / "scratch"
    scratch.mkdir(parents=True, exist_ok=True)
    kept = args.output / "results.json"
    results: dict[str, Any] = json.loads(kept.read_text()) if kept.exists() else {}
    about = f"{device}; commit {commit()}, sources {version}"
    print(about, flush=True)
    chosen = [part for part in PARTS if part.name in (args.part or [part.name])]
    left = []
    for number, part in enumerate(chosen, 1):
        title = f"[{number}/{len(chosen)}] {part.name}: {part.what}"
        before = results.get(part.name, {})
        if (before.get("sources"), before.get("device"), before.get("status")) == (version, device, "passed"):
            print(f"{title}: passed on {before['date']}, skipped", flush=True)
            continue
        if missing := {name for name in part.needs if not find_spec(name)}:
            print(f"{title}: left out. {install_hint(missing)}", flush=True)
            left.append(part.name)
            continue
        if (remaining := end - time.monotonic()) < LEAST:
            print(f"{title}: no time left", flush=True)
            left.append(part.name)
            continue
        print(title, end=" ", flush=True)
        result = run(part, args.device, min(part.limit * patience, remaining), scratch)
        results[part.name] = {"sources": version, "device": device, **result}
        write(kept, json.dumps(results, indent=1))
        write(args.output / "results.md", report(results, about))
        print(f"- {result['status']}, {result['seconds']} s, {result['headline']}", flush=True)
        if result["status"] != "passed":
            left.append(part.name)
    print(f"results: {args.output / 'results.md'} and results.json")
    if left:
        print(f"left: {', '.join(left)}; the same command goes on with these")
    return 1 if left else 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
