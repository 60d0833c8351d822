"""Bundles and logs that are made to do harm."""

from __future__ import annotations

import random
import shutil
import struct
import zipfile
from pathlib import Path

import torch

from binade.data.exchange import bundle
from binade.data.exchange.bundle import BundleError
from binade.data.index.catalog import Catalog
from binade.data.words.filter import Filter
from tests.data.builder import assorted, make_run
from tests.data.test_bundle import HOSTILE, hostile, refused, run_ids
from tests.siege.attack import Attempt, attack, check_sentence
from tests.siege.files import KINDS, command


def pack(place: Path) -> None:
    """A bundle of two runs, with the values of two tensors, and a session: as the tests of bundles have."""
    source = place / "source"
    make_run(source, assorted(1), assorted(2, layer_index=2), label="first")
    make_run(source, assorted(3), label="second", recipe="mxfp4")
    with Catalog.open(source) as catalog:
        chosen = catalog.tensors(Filter(run_id=run_ids(source)[:1]))["tensor_id"].tolist()[:2]
    bundle.write(source, place / "bundle.zip", run_ids(source), chosen, {"session.json": b'{"a": 1}'})


def _claims(content: bytes, size: int) -> bytes:
    """The archive, each of whose files claims to unpack to `size` bytes."""
    raw = bytearray(content)
    at = raw.find(b"PK\1\2")
    while at >= 0:
        struct.pack_into("<I", raw, at + 24, size & 0xFFFFFFFF)
        at = raw.find(b"PK\1\2", at + 4)
    return bytes(raw)


def _quine(path: Path, depth: int) -> None:
    """Zips in zips."""
    content = bytes(1 << 20)
    for level in range(depth):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"runs/{level}.zip" if level else "a", content)
        content = path.read_bytes()


def _damaged(content: bytes, chance: random.Random) -> bytes:
    raw = bytearray(content)
    for _ in range(chance.choice([1, 1, 4, 40])):
        at = len(raw) - 1 - chance.randrange(min(len(raw), chance.choice([6000, len(raw)])))
        match chance.randrange(4):
            case 0:
                raw[at] ^= 1 << chance.randrange(8)
            case 1:
                del raw[at : at + chance.randrange(1, 200)]
            case 2:
                raw[at:at] = chance.randbytes(chance.randrange(1, 50))
            case _:
                raw[at : at + 16] = bytes(len(raw[at : at + 16]))
        if not raw:
            break
    return bytes(raw)


@attack("The bundle is refused in one sentence, and nothing changes", tries=300)
def hostile_bundles(attempt: Attempt) -> None:
    packed = attempt.once("packed", pack) / "bundle.zip"
    path = attempt.place / "hostile.zip"
    case = attempt.case = attempt.choose([*HOSTILE, "zips in zips", "2^32", "two at once", *(["damaged"] * 12)])
    words = ""
    if case == "damaged":
        path.write_bytes(_damaged(packed.read_bytes(), attempt.random))
        try:
            taken = bundle.import_runs(attempt.place / "root", path)
        except BundleError as error:
            check_sentence(error)
        else:
            assert len(taken.added) == 2 and taken.extras == {"session.json": b'{"a": 1}'}
        return
    if case == "zips in zips":
        _quine(path, 6)
    elif case == "2^32":
        path.write_bytes(_claims(packed.read_bytes(), 2**32 - 2))
    elif case == "two at once":
        path.write_bytes(packed.read_bytes() + packed.read_bytes()[:-20])
    else:
        archive, words = hostile(case, packed)
        archive.write(path)
    refused(path, attempt.place, words)


def _huge_record(path: Path) -> None:
    """A .pt whose zip directory claims 2^40 bytes for each record."""
    raw = path.read_bytes()
    out = bytearray()
    directory = raw.find(b"PK\1\2")
    out += raw[:directory]
    start, at = len(out), directory
    while raw[at : at + 4] == b"PK\1\2":
        name, extra, comment = struct.unpack_from("<HHH", raw, at + 28)
        head, rest = bytearray(raw[at : at + 46]), raw[at + 46 : at + 46 + name]
        struct.pack_into("<II", head, 20, 0xFFFFFFFF, 0xFFFFFFFF)
        field = struct.pack("<HHQQ", 1, 16, 1 << 40, 1 << 40)
        struct.pack_into("<H", head, 30, len(field))
        struct.pack_into("<H", head, 32, 0)
        out += head + rest + field
        at += 46 + name + extra + comment
    end = bytearray(raw[raw.rfind(b"PK\5\6") :])
    struct.pack_into("<II", end, 12, len(out) - start, start)
    path.write_bytes(out + end[:20] + b"\0\0")


LOGS = ("damaged", "2^40", "pickle", "empty", "a FIFO", "a link", "a directory", "text", "deep", "not finite")


@attack(
    "Intact files are imported, and each other file is reported in one line; nothing in a file is executed", tries=100
)
def hostile_logs(attempt: Attempt) -> None:
    logs, root = attempt.place / "logs", attempt.place / "runs"
    logs.mkdir()
    torch.save(torch.randn(4, 8), logs / "good.pt")
    path = logs / "bad.pt"
    case = attempt.case = attempt.choose(LOGS)
    torch.save({"tensor": torch.randn(8, 8)}, path)
    match case:
        case "damaged":
            path.write_bytes(_damaged(path.read_bytes(), attempt.random))
        case "2^40":
            _huge_record(path)
        case "pickle":
            path.write_bytes(b"cposix\nsystem\n(S'touch " + str(attempt.place / "new").encode() + b"'\ntR.")
        case "empty":
            path.write_bytes(b"")
        case "text":
            path.write_bytes(attempt.random.randbytes(5000))
        case "deep":
            path.with_suffix(".safetensors").write_bytes(struct.pack("<Q", 1 << 40) + b"[" * 5000)
        case "not finite":
            torch.save(torch.full((4, 4), float("nan")), path)
        case _:
            path.unlink()
            {"a FIFO": KINDS["a FIFO"], "a link": KINDS["a link to a device"], "a directory": Path.mkdir}[case](path)
    status, _, err = command(root, "import", str(logs), "--scores", "", "--workers", "1")
    assert status == 0, err
    assert "Traceback" not in err and not (attempt.place / "new").exists()
    with Catalog.open(root) as catalog:
        assert catalog.totals().tensors >= 1 and not catalog.refused
    shutil.rmtree(root)
