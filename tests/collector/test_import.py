"""binade import: real files of every version, hostile ones among them, and what is there after a kill."""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import random
import re
import signal
import socket
import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from safetensors.torch import save_file

from binade.cli import main
from binade.collector.imports import importer, workers
from binade.collector.imports.workers import Death, scatter
from binade.data.index.cache import ResultCache
from binade.data.index.catalog import Catalog
from binade.data.run.directory import DONE, RunInfo, list_runs
from binade.data.run.notes import notes
from binade.data.run.store import TensorFileError
from binade.data.run.verify import verify
from binade.quant import score, summarize
from binade.quant.backends import cpu, moments, native
from binade.quant.specs import Spec
from tests.collector.forked import forked, kill_at
from tests.collector.logs_made import NAMES, cut_while_read, deadly_read, read_here, tensor, write, write_all
from tests.conftest import ended, run_collector, start_python, until
from tests.data.builder import with_column

pytestmark = pytest.mark.slow

FORMATS = ("mxfp8", "hifp8")
Command = Callable[..., int]


@pytest.fixture
def logs(tmp_path: Path) -> Path:
    directory = tmp_path / "logs"
    directory.mkdir()
    return directory


@pytest.fixture
def in_processes(command: Command, logs: Path) -> Command:
    """binade import of `logs`, without scores unless they are given, with a process that reads."""
    return lambda *more: command("import", str(logs), "--workers", "1", *(more or ("--scores", "")))


@pytest.fixture
def bring(in_processes: Command, monkeypatch: pytest.MonkeyPatch) -> Command:
    """The same, but this process reads."""
    monkeypatch.setattr(importer, "scatter", read_here)
    return in_processes


def only_run(tmp_path: Path) -> RunInfo:
    ((run,), refused) = list_runs(tmp_path / "runs")
    assert refused == []
    return run


def rows(tmp_path: Path) -> pd.DataFrame:
    with Catalog.open(tmp_path / "runs") as catalog:
        assert catalog.refused == []
        return catalog.tensors()


def refusals(tmp_path: Path) -> dict[str, str]:
    lines = (only_run(tmp_path).directory / "refused.jsonl").read_text().splitlines()
    return {record["file"]: record["reason"] for record in map(json.loads, lines)}


@pytest.mark.compiler
@pytest.mark.parametrize("older", [False, True], ids=["zip", "older"])
def test_a_file_of_each_version(bring, capsys, tmp_path, logs, older):
    for dtype in (torch.float32, torch.bfloat16):  # sums agree to the bit if one back end makes them
        units = [cpu.unit_of(Spec.of(fmt), dtype) for fmt in FORMATS]
        built = [native.built(unit) is not None for unit in (*units, moments.UNITS[dtype]) if unit]
        assert all(built) or (native.compiler() is None and not any(built))  # an earlier process may have built all
    made = write_all(logs, older=older)
    before = {path: path.stat() for path in logs.rglob("*") if path.is_file()}
    assert bring("--scores", ",".join(FORMATS)) == 0
    out, err = capsys.readouterr()
    assert err == "" and "9 tensors of 9 files" in out
    assert f"by source: {', '.join(f'{version} 1' for version in NAMES)}\n" in out
    run = only_run(tmp_path)
    assert run.status.state == DONE and run.status.tensors == 9 and run.config["kind"] == "import"
    assert run.config["source"] == str(logs) and run.config["files"] == dict.fromkeys(NAMES, 1)
    with Catalog.open(tmp_path / "runs") as catalog:
        table = catalog.tensors()
        scores = catalog.scores().set_index(["tensor_id", "format"])
        assert set(table["path"]) == set(made) and len(table) == len(made)
        for _, row in table.iterrows():
            x = made[row["path"]]
            assert torch.equal(catalog.load(row["tensor_id"]), x)
            assert tuple(row["shape"]) == tuple(x.shape) and row["dtype"] == str(x.dtype).removeprefix("torch.")
            summary = summarize(x)
            for name in ("min", "max", "mean", "std", "rms", "absmax", "absmin", "kurtosis", "zeros", "nans", "numel"):
                assert row[name] == getattr(summary, name), name
            bins = catalog.distribution(tensor_ids=[row["tensor_id"]]).set_index("bin")["count"].to_dict()
            assert bins == dict(zip(summary.bins.tolist(), summary.counts.tolist(), strict=True))
            for fmt in FORMATS:
                expected = vars(score(x, fmt, -1))
                found = scores.loc[(row["tensor_id"], fmt)]
                wrong = {key: (found[key], value) for key, value in expected.items() if found[key] != value == value}
                assert not wrong, (row["path"], fmt)
    assert set(table["source_version"]) == set(NAMES)
    assert table["model"].isna().all() and table["module"].isna().all() and table["tp_rank"].isna().all()
    after = {path: path.stat() for path in logs.rglob("*") if path.is_file()}
    assert {p: (s.st_size, s.st_mtime_ns) for p, s in after.items()} == {
        p: (s.st_size, s.st_mtime_ns) for p, s in before.items()
    }
    assert not list((run.directory / "tensors").iterdir())


def test_metadata_and_corrections_reach_the_card(bring, tmp_path, logs):
    name = "20250923_100149_0019_iter000_attention_L1_forward_pre_attention_mxfp8_rank00_group000_value.pt"
    metadata = {"layer_type": "attention", "layer_idx": 5, "quant_type": "mxfp_fp8_e4m3_quantized", "rank": 3}
    x = tensor(1, 2, 64, 40)
    write(logs / name, x, metadata | {"save_time": "2025-09-23 10:01:50", "component": "attention"})
    assert bring("--scores", "mxfp8") == 0
    (_, row), *_ = rows(tmp_path).iterrows()
    assert (row["layer_index"], row["rank"], row["quant_type"], row["stage"]) == (5, 3, "mxfp8", "after")
    assert (row["tensor_name"], row["contracted_axis"], row["component"]) == ("key", -2, "FA")
    assert row["captured"] == pd.Timestamp("2025-09-23 10:01:50")
    said = notes(row)
    assert said == notes(row.to_dict())
    assert said[0].endswith("Its file name follows version V3.")
    assert any("actually the key" in sentence for sentence in said)
    assert any("name says layer_index 1, but the metadata inside says 5" in sentence for sentence in said)
    assert "Its log spells the quant type mxfp_fp8_e4m3_quantized." in said
    assert "It was taken after it was quantized." in said and "Not recorded: module, micro-batch." in said
    with Catalog.open(tmp_path / "runs") as catalog:
        assert catalog.scores()["sqnr_db"].item() == score(x, "mxfp8", -2).sqnr_db  # along the axis that is contracted
        assert score(x, "mxfp8", -2) != score(x, "mxfp8", -1)


def test_safetensors_and_npy(bring, tmp_path, logs):
    a, b, c = tensor(1, 8, 16), tensor(2, 40, dtype=torch.float16), tensor(3, 4, 6, dtype=torch.float32)
    save_file({"layer.a": a, "layer.b": b, "index": torch.arange(3)}, logs / "x.safetensors", {"layer_idx": "4"})
    np.save(logs / "c.npy", np.asfortranarray(c.numpy()))
    np.save(logs / "d.npy", c.numpy().astype(np.float64) * 1e-3)
    assert bring() == 0
    table = rows(tmp_path).set_index("tensor_name")
    assert set(table.index) == {"layer.a", "layer.b", "c", "d"} and set(table["layer_index"].dropna()) == {4}
    with Catalog.open(tmp_path / "runs") as catalog:
        for name, x in (("layer.a", a), ("layer.b", b), ("c", c), ("d", (c.double() * 1e-3).float())):
            assert torch.equal(catalog.load(table.loc[name, "tensor_id"]), x)
            assert table.loc[name, "rms"] == summarize(x).rms
    assert table.loc["d", "dtype"] == "float64" and table.loc["d", "nbytes"] == 8 * c.numel()
    assert "rounded to float32" in table.loc["d", "corrections"]
    assert "dtype is int64" in refusals(tmp_path)["x.safetensors"]
    assert bring() == 0  # what was refused of a file that is known is still told
    assert "dtype is int64" in refusals(tmp_path)["x.safetensors"] and len(rows(tmp_path)) == 4


def test_float64_beyond_float32_is_told(bring, tmp_path, logs):
    write(logs / "x.pt", torch.tensor([1.0, 1e300, -1e300, torch.inf], dtype=torch.float64))
    assert bring() == 0
    (_, row), *_ = rows(tmp_path).iterrows()
    assert row["infs"] == 3 and "2 of them exceed the range of float32" in row["corrections"]


class Evil:
    """Makes a file where it is unpickled."""

    def __init__(self, proof: Path) -> None:
        self.proof = proof

    def __reduce__(self):
        return (os.mkdir, (str(self.proof),))


def lie(source: Path, target: Path) -> None:
    """A copy of a log of [6, 70] that claims [2130706432, 70], in the same file."""

    def patched(content: bytes) -> bytes:
        at = content.index(b"K\x06KF\x86")
        return content[:at] + b"J\x00\x00\x00\x7f" + content[at + 2 :]

    if not zipfile.is_zipfile(source):
        target.write_bytes(patched(source.read_bytes()))
        return
    with zipfile.ZipFile(source) as given, zipfile.ZipFile(target, "w") as lying:
        for name in given.namelist():
            content = given.read(name)
            lying.writestr(name, patched(content) if name.endswith("data.pkl") else content)


def hostile(logs: Path, proof: Path) -> dict[str, str]:
    """Files that must be refused, and a part of the reason."""
    good = write(logs / "ok.pt", tensor(0)).read_bytes()
    older = write(logs / "ok_older.pt", tensor(1), {}, older=True).read_bytes()
    for name in ("ok.pt", "ok_older.pt"):
        lie(logs / name, logs / f"lies_{name}")
    bad = torch.zeros(8)
    for name, x in {
        "int": bad.long(),
        "bool": bad.bool(),
        "fp8": bad.to(torch.float8_e4m3fn),
        "complex": bad.cfloat(),
        "sparse": bad.reshape(2, 4).to_sparse(),
        "csr": bad.reshape(2, 4).to_sparse_csr(),
        "quantized": torch.quantize_per_tensor(bad, 0.1, 0, torch.qint8),
        "meta": bad.to("meta"),
        "empty_tensor": bad[:0],
        "repeated": bad[:1].expand(10**12),
        "number": 7,
    }.items():
        torch.save(x, logs / f"{name}.pt")
    torch.save({"weights": [bad]}, logs / "state_dict.pt")
    torch.save({"tensor": bad, "metadata": Evil(proof)}, logs / "evil.pt")
    torch.save({"tensor": bad, "metadata": Evil(proof)}, logs / "evil_older.pt", _use_new_zipfile_serialization=False)
    for name in ("pickle.pt", "pickle.pkl", "pickle.npy", "pickle.safetensors"):
        (logs / name).write_bytes(pickle.dumps(Evil(proof)))
    np.save(logs / "objects.npy", np.array([Evil(proof)], dtype=object), allow_pickle=True)
    np.save(logs / "swapped.npy", np.zeros(4, ">f4"))
    np.save(logs / "integers.npy", np.zeros(4, np.int32))
    np.save(logs / "no_element.npy", np.zeros((0, 4), np.float32))
    huge = {"descr": "<f4", "fortran_order": False, "shape": (10**15, 10**6)}
    with open(logs / "impossible.npy", "wb") as file:
        np.lib.format.write_array_header_1_0(file, huge)
    header = json.dumps({"x": {"dtype": "F32", "shape": [10**12], "data_offsets": [0, 4 * 10**12]}}).encode()
    (logs / "impossible.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (logs / "long_header.safetensors").write_bytes((1 << 62).to_bytes(8, "little") + b"{}")
    (logs / "cut.pt").write_bytes(good[: len(good) // 2])
    (logs / "cut_older.pt").write_bytes(older[:-100])
    with (
        zipfile.ZipFile(logs / "ok.pt") as given,
        zipfile.ZipFile(logs / "deflated.pt", "w", zipfile.ZIP_DEFLATED) as bomb,
    ):
        for name in given.namelist():
            bomb.writestr(name, given.read(name))
        bomb.writestr("archive/data/9", bytes(1 << 24))
    claims = bytearray((logs / "ok.pt").read_bytes())
    at = claims.rindex(b"data/0", 0, claims.rindex(b"PK\x05\x06"))  # in the directory; sizes stand before the name
    at = claims.rindex(b"PK\x01\x02", 0, at)
    claims[at + 20 : at + 28] = b"\xf0\xff\xff\xff" * 2
    (logs / "claims.pt").write_bytes(claims)
    (logs / "zeros.pt").write_bytes(bytes(4096))
    (logs / "nothing.pt").touch()
    (logs / "readme.txt").write_text("hello")
    os.mkfifo(logs / "pipe.pt")
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(os.path.relpath(logs / "socket.pt"))
    (logs / "loop.pt").symlink_to("loop.pt")
    (logs / "out.pt").symlink_to("/etc/passwd")
    (logs / "inside.pt").symlink_to("ok.pt")
    (logs / "around").symlink_to(".")
    (logs / "away").symlink_to("/")
    return {
        **dict.fromkeys(("int.pt", "bool.pt", "fp8.pt", "complex.pt", "quantized.pt"), "dtype"),
        **dict.fromkeys(("sparse.pt", "csr.pt"), "sparse"),
        "integers.npy": "dtype",
        "swapped.npy": "dtype >f4",
        "meta.pt": "no values",
        "empty_tensor.pt": "it is empty",
        "no_element.npy": "",
        "lies_ok.pt": "storage",
        "lies_ok_older.pt": "",
        "repeated.pt": "claims 1000000000000 values",
        "impossible.npy": "",
        "impossible.safetensors": "",
        "long_header.safetensors": "",
        "number.pt": "contains no tensor",
        "state_dict.pt": "1 tensor in lists",
        "evil.pt": "could run code",
        "evil_older.pt": "could run code",
        "pickle.pt": "neither of torch's two formats",
        "pickle.pkl": "is not opened",
        "pickle.npy": "",
        "pickle.safetensors": "",
        "objects.npy": "Python objects",
        "cut.pt": "cut short",
        "cut_older.pt": "",
        "deflated.pt": "compressed",
        "claims.pt": "lists entries beyond the end of the file",
        "zeros.pt": "neither of torch's two formats",
        "nothing.pt": "0 bytes",
        "readme.txt": "not a tensor file",
        **dict.fromkeys(("pipe.pt", "socket.pt"), "not a regular file"),
        "loop.pt": "target does not exist, or that points to itself",
        **dict.fromkeys(("out.pt", "away"), "out of the directory"),
        **dict.fromkeys(("inside.pt", "around"), "found separately"),
    }


@pytest.mark.filterwarnings("ignore:Sparse CSR", "ignore:torch.quantize_per_tensor")
def test_hostile_files_are_refused_and_the_rest_goes_on(in_processes, capsys, tmp_path, logs, monkeypatch):
    monkeypatch.chdir(tmp_path)  # the name of a socket must be short
    expected = hostile(logs, tmp_path / "proof")
    assert in_processes() == 0
    out, err = capsys.readouterr()
    assert err == "" and "2 tensors of 2 files" in out
    assert f"refused: {len(expected)}\n" in out and f"and {len(expected) - 10} more: " in out
    found = refusals(tmp_path)
    assert set(found) == set(expected)
    for name, reason in expected.items():
        assert reason in found[name] and found[name].isprintable() and len(found[name]) < 400, name
    assert not (tmp_path / "proof").exists()
    assert only_run(tmp_path).config["refused"]["count"] == len(expected)
    assert {Path(path).name for path in rows(tmp_path)["path"]} == {"ok.pt", "ok_older.pt"}


def nested(depth: int) -> list:
    inner: list = []
    for _ in range(depth):
        inner = [inner]
    return inner


def test_hostile_metadata_is_neutralised(bring, tmp_path, logs):
    bad = {
        "layer_type": "<script>alert(1)</script>", "operation": "'; DROP TABLE tensor; --", "phase": "../../etc/passwd",
        "component": ["FA"], "tensor_name": "x" * 3_000_000, "quant_type": {"a": float("nan")},
        "layer_idx": float("nan"), "iteration": "1e9", "rank": -1, "module": "/dev/zero", "save_time": "0000-00-00",
        "save_path": "/etc/passwd",
    }  # fmt: skip
    write(logs / "a.pt", tensor(1), bad)
    write(logs / "b.pt", tensor(2), bad | {"deep": nested(300)}, older=True)
    (logs / "<img src=x onerror=alert(1)>'; DROP TABLE run; --\n.pt").write_bytes((logs / "a.pt").read_bytes())
    os.rename(logs / "b.pt", os.fsencode(logs) + b"/\xff.pt")
    assert bring() == 0
    table = rows(tmp_path)
    assert len(table) == 2
    for _, row in table.iterrows():
        words = ("layer_type", "operation", "phase", "component", "quant_type", "layer_index", "rank", "module")
        assert row[[*words, "iteration", "captured"]].isna().all()
        assert row["corrections"].count("was left out.") == 11
        assert not set(row["corrections"]) & set("<>;/")
    assert sorted(table["tensor_name"].fillna("-")) == ["-", "a"]
    assert refusals(tmp_path) == {"\\udcff.pt": "its name is not valid Unicode"}
    os.rename(os.fsencode(logs) + b"/\xff.pt", logs / "b.pt")
    assert bring() == 0 and len(rows(tmp_path)) == 3 and refusals(tmp_path) == {}


def test_importing_again_replaces_the_import_before(bring, capsys, tmp_path, logs):
    write_all(logs, older=False)
    assert bring() == 0
    first, directory = rows(tmp_path), only_run(tmp_path).directory
    assert [path.name for path in directory.glob("segments/*")] == ["import-000001"]
    capsys.readouterr()
    with Catalog.open(tmp_path / "runs") as catalog:  # which has indexed the first one
        assert bring() == 0
        assert "9 tensors of 9 files" in capsys.readouterr().out and only_run(tmp_path).directory == directory
        assert [path.name for path in directory.glob("segments/*")] == ["import-000002"]
        catalog.sync()
        pd.testing.assert_frame_equal(catalog.tensors()[[*first.columns]], first)
        write(logs / "later.pt", tensor(20))
        assert bring("--scores", "mxfp8") == 0
        catalog.sync()
        assert len(catalog.tensors()) == 10 and len(catalog.scores()) == 10 and catalog.refused == []
    again = rows(tmp_path)
    assert len(again) == 10 and set(first["tensor_id"]) < set(again["tensor_id"]) and again["tensor_id"].is_unique
    run = only_run(tmp_path)
    assert run.status.tensors == 10 and run.config["files"]["V2"] == 1 and run.config["scores"] == ["mxfp8"]


def test_an_import_whose_rows_are_damaged_stays(bring, capsys, tmp_path, logs):
    for seed, name in enumerate(("a", "b")):
        write(logs / f"{name}.pt", tensor(seed))
    assert bring() == 0
    before = only_run(tmp_path)
    (file,) = before.directory.glob("segments/*/tensor.parquet")
    file.write_bytes(with_column(file.read_bytes(), "nans", 9))
    damaged = file.read_bytes()
    capsys.readouterr()
    assert bring() == 0 and file.read_bytes() == damaged
    assert f"{before.run_id} is kept" in capsys.readouterr().out
    new = list_runs(tmp_path / "runs")[0][-1]
    assert new.run_id != before.run_id and new.status.tensors == 2
    assert all(before.run_id in line for line in verify(tmp_path / "runs").damaged)


def test_a_file_that_changed_is_imported_anew(bring, tmp_path, logs):
    for seed, name in enumerate(("a", "b")):
        write(logs / f"{name}.pt", tensor(seed))
    assert bring() == 0
    first = rows(tmp_path).set_index("tensor_name")
    x = tensor(9, 5, 5)
    write(logs / "b.pt", x)
    assert bring() == 0
    again = rows(tmp_path).set_index("tensor_name")
    assert again.loc["b", "rms"] == summarize(x).rms != first.loc["b", "rms"]
    assert again.loc["a", "tensor_id"] == first.loc["a", "tensor_id"]
    with Catalog.open(tmp_path / "runs") as catalog:
        assert catalog.distribution()["count"].sum() == again["numel"].sum()
        assert torch.equal(catalog.load(again.loc["b", "tensor_id"]), x)


@pytest.mark.parametrize("how", ["deleted", "damaged"])
def test_the_statistics_of_a_file_that_is_gone_are_kept(bring, capsys, tmp_path, logs, how):
    for seed, name in enumerate(("a", "b")):
        write(logs / f"{name}.pt", tensor(seed))
    assert bring() == 0
    before, table = only_run(tmp_path), rows(tmp_path)
    (logs / "b.pt").unlink() if how == "deleted" else (logs / "b.pt").write_bytes(b"not a tensor")
    capsys.readouterr()
    for _ in range(2):  # the second time it replaces the one without that file
        assert bring() == 0
        assert f"{before.run_id} is kept: it has files that cannot be read any more" in capsys.readouterr().out
        runs, _ = list_runs(tmp_path / "runs")
        assert [(run.status.state, run.status.tensors) for run in runs] == [(DONE, 2), (DONE, 1)]
    both = rows(tmp_path)
    pd.testing.assert_frame_equal(both[both["run_id"] == before.run_id].reset_index(drop=True), table)
    assert both[both["run_id"] != before.run_id]["tensor_name"].tolist() == ["a"]


def overwrite(path: Path, x: torch.Tensor, how: str) -> None:
    """Write other values of the same size into a file, as its tool does; "in secret": with its old modification
    time."""
    before = path.stat()
    if how == "replaced":
        write(path.parent / "new" / path.name, x).replace(path)
    else:
        write(path, x)
    assert path.stat().st_size == before.st_size
    if how == "in secret":
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["written", "replaced", "in secret"])
def test_a_file_that_is_overwritten_is_noticed(bring, command, capsys, tmp_path, logs, how):
    values = [tensor(seed, 5, 5) for seed in range(2)]
    path = write(logs / "a.pt", values[0])
    save_file({"x": tensor(2, 5, 5), "y": tensor(3, 5, 5)}, logs / "two.safetensors")
    assert bring() == 0
    with Catalog.open(tmp_path / "runs") as catalog:
        catalog.cache = ResultCache(1 << 20)
        (tensor_id,) = catalog.tensors().query("tensor_name == 'a'")["tensor_id"]
        loaded = catalog.load(tensor_id)
        content = catalog.contents([tensor_id])
        overwrite(path, values[1], how)
        assert torch.equal(loaded, values[0])  # what was read stays
        assert catalog.contents([tensor_id]) != content
        with pytest.raises(TensorFileError, match="it has changed since it was imported: import"):
            catalog.load(tensor_id)
        assert command("verify", str(tmp_path / "runs")) == 1
        assert f"names {path}, which has changed since it was imported" in capsys.readouterr().out
        path.write_bytes(path.read_bytes()[:-1])
        with pytest.raises(TensorFileError, match="has changed"):
            catalog.load(tensor_id)
        write(path, values[0])  # the same content with another time
        assert torch.equal(catalog.load(tensor_id), values[0])
    assert command("verify", str(tmp_path / "runs")) == 0
    overwrite(path, values[1], how)
    assert bring() == 0 and command("verify", str(tmp_path / "runs")) == 0
    with Catalog.open(tmp_path / "runs") as catalog:
        (again,) = catalog.tensors().query("tensor_name == 'a'")["tensor_id"]
        assert again != tensor_id and torch.equal(catalog.load(again), values[1])
    path.unlink()
    capsys.readouterr()
    assert command("verify", str(tmp_path / "runs")) == 0
    assert "1 imported file no longer there: only statistics are kept" in capsys.readouterr().out


@pytest.mark.thorough
def test_an_id_never_stands_for_another_tensor(bring, capsys, tmp_path, logs):
    """Whatever is added, overwritten, deleted and touched between the imports: also in the runs that are kept."""
    chance, meant = random.Random(0), {}
    for seed in range(60):
        path = logs / f"{chance.choice('abcde')}.pt"
        match chance.choice(["write", "write", "write", "delete", "touch", "damage"]):
            case "write":
                write(path, tensor(seed))
            case "delete":
                path.unlink(missing_ok=True)
            case "damage":
                path.write_bytes(b"not a tensor")
            case "touch" if path.exists():
                path.touch()
        if seed % 3 == 2:
            status, out = bring(), capsys.readouterr().out
            assert status in (0, 1)
            table = rows(tmp_path)
            for _, row in table.iterrows():
                file = Path(row["path"])
                known = {"path": file, "sha256": row["sha256"], "rms": row["rms"]}
                assert meant.setdefault(row["tensor_id"].rpartition("/")[2], known) == known
            if found := re.search(r"(\S+): [0-9]+ tensors of", out):
                written = table[table["run_id"] == found[1]]
                assert all(row["rms"] == summarize(torch.load(row["path"])).rms for _, row in written.iterrows())
            contents = [(known["path"], known["sha256"]) for known in meant.values()]
            assert len(contents) == len({*contents}), "an unchanged file has two ids"
    assert len(meant) > 20


# The run and its segment come to be between these calls of functions of os.
MOMENTS = ("rename-1", "rename-2", "fsync-6", "replace-9", "replace-12")


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folders `logs`, and of each of MOMENTS what an import left that was killed there: a fork, which reads the
    files itself."""
    place = tmp_path_factory.mktemp("killed")
    for seed in range(18):
        write(place / "logs" / f"x{seed:02d}.pt", tensor(seed, 4, 9))

    def attempt(moment: str) -> int:
        importer.ROWS = 4
        workers.prepare = lambda module: None
        importer.scatter = read_here
        call, left = moment.split("-")
        kill_at(call, int(left))
        return main(["import", str(place / "logs"), "--scores", "", "--tensor-save-dir", str(place / moment / "runs")])

    for moment in MOMENTS:
        assert forked(partial(attempt, moment), {}) == [-signal.SIGKILL], moment
    return place


@pytest.mark.sampled(2)
@pytest.mark.parametrize("moment", MOMENTS)
def test_an_import_that_was_killed_goes_on(bring, command, killed, moment):
    place = killed / moment
    runs, _ = list_runs(place / "runs")
    before = rows(place) if runs else pd.DataFrame(columns=["tensor_id", "tensor_name"])
    assert [run.status.state for run in runs] in ([], ["crashed"]) and len(before) in (0, 18)
    usual = ("--scores", "", "--workers", "1", "--tensor-save-dir", str(place / "runs"))
    assert command("import", str(killed / "logs"), *usual) == 0
    table = rows(place)
    assert sorted(table["tensor_name"]) == [f"x{seed:02d}" for seed in range(18)] and table["tensor_id"].is_unique
    assert set(before["tensor_id"]) <= set(table["tensor_id"]) and only_run(place).status.state == DONE
    assert table.set_index("tensor_name")["rms"].to_dict() == {
        f"x{seed:02d}": summarize(tensor(seed, 4, 9)).rms for seed in range(18)
    }


# After ten files it does nothing until it is interrupted.
PAUSED = """
import itertools, signal, sys
from pathlib import Path
from binade.cli import main
from binade.collector.imports import importer
importer.ROWS = 2
add = importer._Read.add
files = itertools.count()
def paused(self, *arguments):
    if next(files) == 10:
        Path(sys.argv[2], "paused").touch()
        signal.pause()
    add(self, *arguments)
importer._Read.add = paused
sys.exit(main(["import", sys.argv[1], "--scores", "", "--workers", "2", "--tensor-save-dir", sys.argv[2]]))
"""


@pytest.mark.thorough
def test_ctrl_c_leaves_the_import_before(bring, tmp_path, logs):
    write(logs / "x00.pt", tensor(0, 4, 9))
    assert bring() == 0
    kept = rows(tmp_path)
    for seed in range(1, 40):
        write(logs / f"x{seed:02d}.pt", tensor(seed, 4, 9))
    with start_python("-c", PAUSED, logs, tmp_path / "runs", start_new_session=True) as running:
        until((tmp_path / "runs" / "paused").exists, "ten files")
        os.killpg(running.pid, signal.SIGINT)  # the terminal tells everyone
        err = ended(running).stderr
    assert running.returncode == 130 and err == "binade: cancelled; what was imported before is kept\n", err
    assert only_run(tmp_path).status.state == DONE
    pd.testing.assert_frame_equal(rows(tmp_path), kept)
    assert bring() == 0
    table = rows(tmp_path)
    assert len(table) == 40 and set(kept["tensor_id"]) < set(table["tensor_id"]) and table["path"].is_unique
    assert only_run(tmp_path).status.state == DONE


def test_a_reader_that_dies_costs_its_file_only(in_processes, tmp_path, logs, monkeypatch):
    monkeypatch.setattr(importer, "read_file", deadly_read)
    for seed, name in enumerate(("a", "b_killed", "c", "d_crashed", "e", "f")):
        write(logs / f"{name}.pt", tensor(seed))
    assert in_processes() == 0
    assert sorted(rows(tmp_path)["tensor_name"]) == ["a", "c", "e", "f"]
    found = refusals(tmp_path)
    assert "SIGKILL" in found["b_killed.pt"] and "memory" in found["b_killed.pt"]
    assert found["d_crashed.pt"] == "its reader crashed (SIGSEGV)" and len(found) == 2


@pytest.mark.thorough
def test_a_file_that_is_cut_while_it_is_read_kills_only_its_reader(tmp_path):
    path = write(tmp_path / "x.pt", torch.ones(1 << 20))
    results = dict(scatter([str(path), *map(str, range(20))], cut_while_read, 2))
    assert results.pop(str(path)) == Death(-signal.SIGBUS)
    assert results == {str(i): 2.0 * i for i in range(20)}


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path):
    from binade.data.exchange.foreign import opened

    path = write(tmp_path / "x.pt", tensor(0))
    with pytest.raises(TensorFileError, match="changed while it was read"), opened(path) as file:
        next(file.tensors)
        os.utime(path, ns=(0, 0))


def test_what_does_not_fit_into_memory(bring, tmp_path, logs, monkeypatch):
    monkeypatch.setattr(importer, "SMALL", 0)
    monkeypatch.setattr(importer, "available_host_memory", lambda: 10_000)
    write(logs / "zip.pt", tensor(0, 80, 50), {})
    write(logs / "older.pt", tensor(1, 80, 100), {}, older=True)
    write(logs / "small.pt", tensor(1, 8, 10), {}, older=True)
    assert bring("--scores", "mxfp8") == 0
    table = rows(tmp_path).set_index("tensor_name")
    assert set(table.index) == {"zip", "small"}
    assert "Not scored" in table.loc["zip", "corrections"] and table["corrections"].isna()["small"]
    assert "cannot be memory-mapped" in refusals(tmp_path)["older.pt"]
    with Catalog.open(tmp_path / "runs") as catalog:
        assert list(catalog.scores()["tensor_id"]) == [table.loc["small", "tensor_id"]]
    monkeypatch.undo()


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("nowhere",), "nowhere does not exist"),
        (("x" * 300,), "does not exist"),
        (("~nobody-of-that-name",), "~nobody-of-that-name does not exist"),
        (("file",), "is not recognized as a loss log; looked for: "),
        (("logs", "--workers", "0"), "--workers is 0"),
        (("logs", "--scores", "fp3"), "unknown format 'fp3'"),
        ((), "missing argument 'PATH'"),
        (("logs", "--workers", "x"), "'x' is not a valid integer"),
        (("runs",), "is the root of the runs"),
    ],
    ids=["missing", "name too long", "nobody's home", "file", "workers", "scores", "none", "no number", "root"],
)
def test_wrong_input_is_exit_2(command, capsys, tmp_path, monkeypatch, logs, arguments, said):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    if arguments[:1] == ("runs",):
        (tmp_path / "runs").mkdir()
    write(logs / "x.pt", tensor(0))
    before = sorted(tmp_path.rglob("*"))
    assert command("import", *arguments) == 2
    out, err = capsys.readouterr()
    assert out == "" and said in err and err.count("\n") == 1 and sorted(tmp_path.rglob("*")) == before


def test_a_directory_of_which_all_is_refused_is_exit_1(bring, capsys, tmp_path, logs):
    (logs / "a.pkl").write_bytes(b"x")
    (logs / "b.pt").touch()
    assert bring() == 1
    out, err = capsys.readouterr()
    assert err.startswith("binade: every file of") and err.count("\n") == 1 and "a.pkl: a pickle" in out
    assert "b.pt: it is empty" in out and list_runs(tmp_path / "runs") == ([], [])
    write(logs / "c.pt", tensor(0))
    assert bring() == 0
    before = rows(tmp_path)
    (logs / "c.pt").unlink()
    assert bring() == 1  # and what was imported before stays
    pd.testing.assert_frame_equal(rows(tmp_path), before)


def test_an_empty_directory_is_exit_0(bring, capsys, tmp_path):
    assert bring() == 0
    assert "nothing to import" in capsys.readouterr().out and not (tmp_path / "runs").exists()


def test_an_unwritable_root_is_exit_1(command, capsys, logs):
    write(logs / "x.pt", tensor(0))
    assert command("import", str(logs), "--tensor-save-dir", "/proc/binade") == 1
    assert "cannot write to" in capsys.readouterr().err


def test_the_root_and_unreadable_directories_are_passed_over(bring, command, capsys, tmp_path, logs):
    write(logs / "x.pt", tensor(0))
    root = ("--scores", "", "--tensor-save-dir", str(logs / "runs"))
    assert command("import", str(logs), *root) == command("import", str(logs), *root) == 0
    (run,), _ = list_runs(logs / "runs")
    assert run.status.tensors == 1 and (run.directory / "refused.jsonl").read_text() == ""


def test_two_imports_of_one_directory_at_once(bring, capsys, tmp_path, logs):
    write(logs / "x.pt", tensor(0))
    assert bring() == 0
    held = os.open(only_run(tmp_path).directory / "segments", os.O_RDONLY)
    fcntl.flock(held, fcntl.LOCK_EX)
    assert bring() == 1
    os.close(held)
    assert "is being imported" in capsys.readouterr().err
    assert bring() == 0


def test_another_directory_is_another_run(bring, command, tmp_path, logs):
    for name in ("one", "two"):
        write(logs / name / "x.pt", tensor(0))
        assert command("import", str(logs / name), "--scores", "") == 0
    runs, _ = list_runs(tmp_path / "runs")
    assert [run.config["source"] for run in runs] == [str(logs / "one"), str(logs / "two")]


@pytest.mark.thorough
def test_in_a_process_of_its_own(tmp_path, logs):
    write_all(logs, older=True)
    (logs / "x\x1b[31m\n.pkl").write_text("x")
    done = run_collector("import", str(logs), root=tmp_path / "runs")
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert all(line.isprintable() for line in lines) and any("x\\x1b[31m\\n.pkl: a pickle" in line for line in lines)
    run = only_run(tmp_path)
    assert run.config["command"] == f"binade import {logs}"
    assert "9 files to read" in (run.directory / "log.txt").read_text() and len(rows(tmp_path)) == 9


def test_a_run_that_is_no_import_names_no_file_out_of_it(bring, tmp_path, logs):
    from binade.data.index.catalog import CatalogError

    write(logs / "x.pt", tensor(0))
    assert bring() == 0
    run = only_run(tmp_path)
    (run.directory / "run.json").write_text(json.dumps(run.config | {"kind": "run"}))
    with (
        Catalog.open(tmp_path / "runs") as catalog,
        pytest.raises(CatalogError, match="allowed only for imported tensors"),
    ):
        catalog.load(catalog.tensors()["tensor_id"].item())
