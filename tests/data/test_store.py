"""Tensor files: what comes back, what they cost, and what a damaged or hostile one does."""

from __future__ import annotations

import contextlib
import errno
import io
import os
import pickle
import resource
import stat
import subprocess
import sys
import unicodedata
import zipfile
from pathlib import Path

import pandas as pd
import pytest
import torch

from binade.data.exchange.foreign import load_foreign
from binade.data.run.store import (
    HOST,
    TensorFileError,
    check_regular,
    encode,
    read_file,
    read_text,
    remove_directory,
    save_state,
    staged_directory,
    staged_file,
    staging_directory,
    temporary_file,
    write_atomic,
)
from binade.data.run.tensor_files import load
from binade.data.words.text import csv_cell, csv_table, describe, one_line
from tests.conftest import PROJECT, run_python

pytestmark = pytest.mark.slow

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits(x: torch.Tensor) -> torch.Tensor:
    """The tensor's own bytes, so that NaNs compare."""
    return x.contiguous().reshape(-1).view(torch.uint8)


def archive(pickled: bytes) -> bytes:
    """A torch-style zip whose pickle is the given bytes."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/byteorder", "little")
        file.writestr("archive/version", "3\n")
    return buffer.getvalue()


def saved(content: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(content, buffer)
    return buffer.getvalue()


def test_what_killed_processes_left_aside_is_deleted(tmp_path):
    for write in ("staged_file", "staging_directory", "staged_directory"):
        line = f"writing = {write}(Path({str(tmp_path / 'draw')!r})); writing.__enter__(); os.kill(os.getpid(), 9)"
        code = f"import os; from pathlib import Path; from binade.data.run.store import {write}; {line}"
        assert run_python("-c", code).returncode == -9
    left = [*tmp_path.iterdir()]
    assert len(left) == 3 and all(path.name.startswith(".draw.") for path in left)
    others = [tmp_path / name for name in (".draw.elsewhere.1.part", f".other.{HOST}.1.part", f".draw.{HOST}.1.old")]
    for path in others:
        path.touch()
    with staging_directory(tmp_path / "draw") as first, temporary_file(tmp_path / "draw") as (second, _):
        write_atomic(tmp_path / "draw", b"new")  # sweeps, but not what is being written
        assert {*tmp_path.iterdir()} == {first, second, tmp_path / "draw", *others}


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127, "a b\n"])
def test_any_name_can_be_written(tmp_path, name):
    write_atomic(tmp_path / name, b"x")
    with staged_directory(tmp_path / f"{name[:-1]}d") as part:
        (part / "file").touch()
    assert {path.name for path in tmp_path.iterdir()} == {name, f"{name[:-1]}d"}


def test_a_new_file_has_the_mode_of_a_plain_one_and_follows_no_link(tmp_path):
    (tmp_path / "plain").write_bytes(b"")
    (tmp_path / "elsewhere").write_bytes(b"theirs")
    (tmp_path / "new").symlink_to("elsewhere")
    write_atomic(tmp_path / "new", b"mine")
    assert (tmp_path / "new").stat().st_mode == (tmp_path / "plain").stat().st_mode
    assert not (tmp_path / "new").is_symlink() and (tmp_path / "elsewhere").read_bytes() == b"theirs"


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_pattern_comes_back(tmp_path, dtype):
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16)
    x = x.view(dtype) if dtype.itemsize == 2 else (x.int() << 16 | 0x1234).view(dtype)
    x = x.reshape(64, 4, 256)
    write_atomic(tmp_path / "x.pt", content := encode(x, {"layer_type": "linear"}, {"shape": [64, 4, 256]}))
    size = len(content)
    assert size == (tmp_path / "x.pt").stat().st_size
    content = torch.load(tmp_path / "x.pt", weights_only=True, mmap=True)
    assert set(content) == {"tensor", "tensor_info", "metadata"}
    assert content["metadata"] == {"layer_type": "linear"} and content["tensor_info"] == {"shape": [64, 4, 256]}
    for y in (load(tmp_path / "x.pt"), content["tensor"]):
        assert y.dtype == dtype and y.shape == x.shape and torch.equal(bits(x), bits(y))


@pytest.mark.parametrize(
    "view",
    [
        lambda base: base[3, :10],
        lambda base: base.t(),
        lambda base: base[:, ::7],
        lambda base: base[:1].expand(4, -1),
        lambda base: base[5, 5],
        lambda base: base[:0],
        lambda base: base.requires_grad_() * 1,
    ],
    ids=["row", "transposed", "strided", "expanded", "scalar", "empty", "with a graph"],
)
def test_a_view_is_stored_by_itself(tmp_path, view):
    x = view(torch.randn(512, 512))
    write_atomic(tmp_path / "x.pt", content := encode(x, {}, {}))
    size = len(content)
    y = load(tmp_path / "x.pt")
    assert torch.equal(x, y) and y.is_contiguous() and not y.requires_grad
    assert y.untyped_storage().nbytes() == x.numel() * 4
    assert size < x.numel() * 4 + 4096


def test_of_a_link_only_the_link_is_deleted(tmp_path):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "mine").write_text("mine")
    (tmp_path / "run").symlink_to("other")
    remove_directory(tmp_path / "run")
    assert sorted(map(str, tmp_path.rglob("*"))) == [f"{tmp_path}/other", f"{tmp_path}/other/mine"]


def test_saving_leaves_the_tensor_alone_and_apart(tmp_path):
    x = torch.ones(8)
    content = encode(x, {}, {})
    x.zero_()
    write_atomic(tmp_path / "x.pt", content)
    assert torch.equal(load(tmp_path / "x.pt"), torch.ones(8))


def test_loading_maps_the_file(tmp_path):
    write_atomic(tmp_path / "x.pt", encode(torch.zeros(1 << 20), {}, {}))
    x = load(tmp_path / "x.pt")
    maps = Path("/proc/self/maps").read_text()
    assert str(tmp_path / "x.pt") in maps
    x[0] = 1.0  # the mapping is private
    assert load(tmp_path / "x.pt")[0] == 0


GOOD = saved({"tensor": torch.randn(100, 100), "tensor_info": {}, "metadata": {}})
DAMAGED = {
    "empty": b"",
    "garbage": b"xyz" * 1000,
    "cut short": GOOD[: len(GOOD) // 2],
    "last bytes missing": GOOD[:-10],
    "text": b"hello\n",
    "a zip without a pickle": archive(b"").replace(b"data.pkl", b"data.bin"),
    "empty pickle": archive(b""),
    "pickle that only stops": archive(b"."),
    "pickle with an unknown memo": archive(b"h\x05."),
    "pickle cut in a number": archive(b"\x80\x02X"),
    "pickle with a wrong storage": archive(b"\x80\x02K\x01Q."),
    "no dict": saved([torch.ones(3)]),
    "dict without a tensor": saved({"tensor_info": {}, "metadata": {}}),
    "tensor that is none": saved({"tensor": [1.0, 2.0]}),
    "old format": pickle.dumps({"tensor": 1}),
    "a module": saved({"tensor": torch.nn.Linear(2, 2)}),
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name):
    path = tmp_path / "broken.pt"
    path.write_bytes(DAMAGED[name])
    with pytest.raises(TensorFileError, match=r"broken.pt") as caught:
        load(path)
    assert "\n" not in str(caught.value)


def test_a_missing_file_and_a_directory_are_named(tmp_path):
    with pytest.raises(TensorFileError, match=r"gone.pt .* it is missing"):
        load(tmp_path / "gone.pt")
    with pytest.raises(TensorFileError, match="cannot be read"):
        load(tmp_path)


class Bomb:
    """Pickles as a call that leaves a mark."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return os.mkdir, (str(self.mark),)


@pytest.mark.parametrize("place", ["instead of the tensor", "beside the tensor", "the whole file", "in a bare pickle"])
def test_nothing_in_a_file_is_executed(tmp_path, place):
    bomb, x = Bomb(tmp_path / "mark"), torch.ones(3)
    content = {
        "instead of the tensor": lambda: saved({"tensor": bomb}),
        "beside the tensor": lambda: saved({"tensor": x, "metadata": {"a": bomb}}),
        "the whole file": lambda: saved(bomb),
        "in a bare pickle": lambda: pickle.dumps({"tensor": bomb}),
    }[place]()
    (tmp_path / "bomb.pt").write_bytes(content)
    with pytest.raises(TensorFileError, match=r"bomb.pt"):
        load(tmp_path / "bomb.pt")
    assert not (tmp_path / "mark").exists()
    if place != "in a bare pickle":  # the bomb is a live one
        torch.load(tmp_path / "bomb.pt", weights_only=False)
        assert (tmp_path / "mark").exists()


def test_flipped_bytes_raise_nothing_else(tmp_path):
    generator = torch.Generator().manual_seed(0)
    path = tmp_path / "x.pt"
    edges = [*range(1200), *range(len(GOOD) - 900, len(GOOD))]
    for _ in range(200):
        content = bytearray(GOOD)
        for place in torch.randint(len(edges), (4,), generator=generator).tolist():
            content[edges[place]] = int(torch.randint(256, (), generator=generator))
        path.write_bytes(content)
        with contextlib.suppress(TensorFileError):
            load(path)


def test_write_atomic_replaces_and_leaves_nothing_aside(tmp_path):
    write_atomic(tmp_path / "a.json", b"one")
    write_atomic(tmp_path / "a.json", memoryview(b"two"))
    assert [p.name for p in tmp_path.iterdir()] == ["a.json"]
    assert (tmp_path / "a.json").read_bytes() == b"two"


def test_write_atomic_fails_cleanly_when_the_name_is_taken(tmp_path):
    (tmp_path / "a").mkdir()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path / "a", b"x")
    assert [p.name for p in tmp_path.iterdir()] == ["a"] and stat.S_ISDIR((tmp_path / "a").stat().st_mode)


CHILD = """
import sys, torch
from pathlib import Path
from binade.data.run.store import encode, write_atomic
from binade.data.run.segment import write_segment
from tests.data.builder import row
root = Path(sys.argv[1])
rows = [row("r", i, torch.randn(64, 64), None, format="mxfp8") for i in range(40)]
for write in (
    lambda: write_atomic(root / "x.pt", encode(torch.zeros(100_000), {}, {})),
    lambda: write_segment(root, "rank00-000001", rows),
):
    try:
        write()
    except OSError as error:
        print("refused", error.errno)
"""


@pytest.mark.thorough
@pytest.mark.parametrize("limit", [0, 9000])
def test_a_refused_write_leaves_nothing_behind(tmp_path, limit):
    """Of a tensor and of a segment."""
    (tmp_path / "x.pt").write_bytes(b"old")
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path)],
        cwd=PROJECT,
        capture_output=True,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit)),
    )
    assert done.stdout == f"refused {errno.EFBIG}\n" * 2, done.stderr
    assert [p.name for p in tmp_path.iterdir()] == ["x.pt"]
    assert (tmp_path / "x.pt").read_bytes() == b"old"


def test_a_record_that_claims_a_terabyte_is_refused(tmp_path):
    write_atomic(tmp_path / "x.pt", encode(torch.zeros(64), {}, {}))
    with zipfile.ZipFile(tmp_path / "x.pt", "a") as archive:
        (record,) = (entry for entry in archive.infolist() if entry.filename.endswith("data/0"))
        record.file_size = record.compress_size = 1 << 40
        archive.writestr("archive/more", b"")  # the directory is written again
    with pytest.raises(TensorFileError, match="its ZIP directory lists entries beyond the end of the file"):
        load_foreign(tmp_path / "x.pt")
    with pytest.raises(TensorFileError, match="cannot be read as a tensor file"):
        load(tmp_path / "x.pt")


def test_a_staged_directory_appears_whole_or_not_at_all(tmp_path):
    with pytest.raises(IsADirectoryError), staged_directory(tmp_path / "a") as part:
        part.write_text("1")
    assert list(tmp_path.iterdir()) == []
    with staged_directory(tmp_path / "a") as part:
        (part / "one").write_text("1")
        assert not (tmp_path / "a").exists()
    with pytest.raises(OSError, match="not empty"), staged_directory(tmp_path / "a") as part:
        (part / "two").write_text("2")
    assert [path.relative_to(tmp_path) for path in tmp_path.rglob("*")] == [Path("a"), Path("a/one")]
    remove_directory(tmp_path / "a")
    assert list(tmp_path.iterdir()) == []


def test_messages_are_one_line():
    assert one_line("\x1b[31ma\n  b\x1b[0m\n\nLINE 1: SELECT") == "a b" and one_line("x" * 9, longest=3) == "xxx"
    assert describe(OSError(28, "No space left on device", "/x")) == "no space left on device (/x)"
    assert [describe(error) for error in (MemoryError(), KeyError(), ValueError("a\nb"))] == [
        "out of memory",
        "KeyError",
        "a",
    ]


def test_csv_has_no_formulas():
    """Text that begins as one does gets an apostrophe; numbers stay, and pandas reads all else back."""
    formulas = ["=1+1", " =1", "+cmd|' /C calc'!A0", "-2+3", "@SUM(A1)", "-", "+1e5x"]
    assert [csv_cell(text) for text in formulas] == [f"'{text}" for text in formulas]
    formulas += [";1", "\t1", *(f"{sign}1" for sign in "\uff1d\uff0b\uff0d\uff20")]
    assert [csv_cell(text) for text in formulas] == [f"'{text}" for text in formulas]
    assert [csv_cell(text) for text in (";=1", "\t=1", "a;=1", "a\t@x", "a; \uff1d1", "a\n+x")] == [
        "';'=1",
        "'\t'=1",
        "a;'=1", "a\t'@x", "a; '\uff1d1", "a\n'+x",
    ]  # fmt: skip
    kept = ["1;-2; +.5;-inf", "a, -b", "mxfp4", "", "1-2", "'=1", "-1.5", "+.5e-3", "-inf", -3.5, None, True]
    assert [csv_cell(value) for value in kept] == kept
    frame = pd.DataFrame({"=a": ["=1", "x"], "n": [-1.5, 2.0], "c": pd.Categorical(["@x", "y"])})
    assert csv_table(frame, "recipe ,=A1; +x\ntwo") == "# recipe ,'=A1;' +x\n# two\n'=a,n,c\n'=1,-1.5,'@x\nx,2.0,y\n"
    assert frame["=a"][0] == "=1"  # the table itself is left as it is


SKIPPED = {"Cc", "Cf", "Co", "Cn", "Zs", "Zl", "Zp", "Mn", "Me"}  # categories that show nothing of their own


@pytest.mark.parametrize("sign", "=@+-\uff1d\uff20\uff0b\uff0d\ufe66\u207c")
def test_characters_that_a_spreadsheet_skips_hide_no_formula(sign):
    """Of every category, alone and together, in a cell and behind the separator of another locale."""
    skipped = {unicodedata.category(chr(code)): chr(code) for code in range(0x11000) if chr(code) not in "\t\r\n"}
    hidden = [skipped[category] for category in SKIPPED] + list(
        "\0\x01\x7f\xa0\xad\u061c\u200b\u200e\u2060\ufeff\ufe0f\u3164"
    )
    for prefix in [*hidden, "".join(hidden), " \u200b\xa0", "\ufeff\ufeff"]:
        formula = f"{prefix}{sign}cmd|' /C calc'!A0"
        assert csv_cell(formula) == f"'{formula}"
        assert csv_cell(f"a;{formula}") == f"a;{prefix}'{sign}cmd|' /C calc'!A0"
        assert csv_table(pd.DataFrame({formula: [formula]})) == f"'{formula}\n'{formula}\n"
    for number in ("-1.5", "\u200b-1.5", "\ufeff+2e3", "\u22121", "\u200b", "a\u200b=1", "caf\u0301e=1"):
        assert csv_cell(number) == number


@pytest.mark.parametrize(
    "make",
    [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), Path.mkdir],
    ids=["fifo", "link to a device", "directory"],
)
def test_what_is_not_a_regular_file_is_not_read(tmp_path, make):
    make(tmp_path / "named")
    for read in (read_text, read_file, check_regular):
        with pytest.raises(OSError, match=r"regular file|directory"):
            read(tmp_path / "named")


@pytest.mark.parametrize("small_disk", ["1m"], indirect=True)
def test_a_disk_that_torch_fills_is_reported_as_full(small_disk):
    """Wherever in the file it fills up; what was there before stays."""
    write_atomic(small_disk / "x.pt", b"before")
    for size in (150_000, 230_000, 262_000, 263_000, 270_000, 300_000, 900_000):
        state = {"first": torch.zeros(100_000), "second": torch.zeros(size - 100_000)}
        if size < 250_000:
            with staged_file(small_disk / "y.pt") as file:
                save_state(state, file)
            (small_disk / "y.pt").unlink()
            continue
        with pytest.raises(OSError, match="No space left on device"), staged_file(small_disk / "x.pt") as file:
            save_state(state, file)
        assert [path.name for path in small_disk.iterdir()] == ["x.pt"]
        assert (small_disk / "x.pt").read_bytes() == b"before"


def test_a_text_has_a_limit_and_is_utf_8(tmp_path):
    (tmp_path / "text").write_bytes("−".encode() * 10)
    assert read_text(tmp_path / "text", 30) == "−" * 10
    with pytest.raises(OSError, match="too large"):
        read_text(tmp_path / "text", 29)
    (tmp_path / "text").write_bytes(b"\xe9")
    with pytest.raises(UnicodeDecodeError):
        read_text(tmp_path / "text")
