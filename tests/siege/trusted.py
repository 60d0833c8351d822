"""Files that a user names, such as a recipe or a model's settings, which are not what they seem to be."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from tests.conftest import PROJECT
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import LINE

MEMORY = 3 << 30  # bytes of address space, most of which torch reserves


def _bomb(first: str, value: str) -> str:
    return f"a0: &a0 {first}\n" + "".join(f"a{i}: &a{i} {value.replace('*', f'*a{i - 1}')}\n" for i in range(1, 40))


CONTENTS: dict[str, Callable[[Path], object]] = {
    "FIFO": os.mkfifo,
    "endless": lambda path: path.symlink_to("/dev/zero"),
    "large": lambda path: path.write_bytes(b" " * (300 << 20)),
    "merges": lambda path: path.write_text(_bomb("{x: 1, y: 2}", "{<<: [*, *, *, *]}")),
    "aliases": lambda path: path.write_text(_bomb("[x, y]", "[*, *, *]")),
    "itself": lambda path: path.write_text("configs: &a\n  x: *a\nmatchers: {}\n"),
    "directory": Path.mkdir,
    "no text": lambda path: path.write_bytes(b"\xff\xfe\0"),
}


def _model(place: Path, name: str) -> Path:
    (place / "model").mkdir(exist_ok=True)
    return place / "model" / name


READERS: dict[str, Callable[[Path], tuple[Path, tuple[str, ...]]]] = {
    "recipe": lambda place: (place / "r.toml", ("run", "--quantization", str(place / "r.toml"), "--dry-run")),
    "precision file": lambda place: (place / "r.yaml", ("run", "--quantization", str(place / "r.yaml"), "--dry-run")),
    "model": lambda place: (_model(place, "config.json"), ("run", "--model", str(place / "model"), "--dry-run")),
    "configuration": lambda place: (place / "c.json", ("run", "--config", str(place / "c.json"))),
    "lines": lambda place: (place / "t.jsonl", (*LINE, "--dataset", str(place / "t.jsonl"))),
    "table": lambda place: (place / "t.parquet", (*LINE, "--dataset", str(place / "t.parquet"))),
    "losses": lambda place: (place / "l.csv", ("import", "--recipe", "bf16", str(place / "l.csv"))),
    "operators": lambda place: (place / "u.txt", ("serve", str(place), "--operators", str(place / "u.txt"))),
}


@attack("One line says what is wrong with the file, within seconds and little memory", tries=64, seconds=120)
def odd_trusted_files(attempt: Attempt) -> None:
    reader, content = attempt.choose([(reader, content) for reader in READERS for content in CONTENTS])
    attempt.case = f"{reader}: {content}"
    path, line = READERS[reader](attempt.place)
    CONTENTS[content](path)
    check_refused(line, attempt.place)
    shutil.rmtree(attempt.place, ignore_errors=True)


def check_refused(line: tuple[str, ...], place: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "binade", *line],
        cwd=PROJECT,
        env=os.environ | {"TENSOR_SAVE_DIR": str(place / "runs"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_DATA, (MEMORY, MEMORY)),
    )
    assert done.returncode in (1, 2) and "Traceback" not in done.stderr, (done.returncode, done.stderr[-500:])
    check_sentence(done.stderr.strip().splitlines()[-1])
    assert "emory" not in done.stderr, done.stderr[-300:]
