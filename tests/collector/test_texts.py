"""Datasets of text: the built-in ones' schemas, files of one's own, what is refused, and how little is held."""

from __future__ import annotations

import errno
import gzip
import hashlib
import json
import os
import pydoc_data.topics
import random

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from binade.collector.datasets.inputs import DATASETS, find_dataset
from binade.collector.datasets.texts import Texts, open_texts
from binade.collector.errors import ConfigError, DataError
from tests.conftest import run_python

# The keys of the published data sets: Hugging Face's wikimedia/wikipedia and allenai/dolma.
SCHEMAS = {
    "wikipedia": {"id": str, "url": str, "title": str, "text": str},
    "dolma": {"id": str, "text": str, "source": str, "added": str, "created": str, "metadata": dict},
}


def opened(name) -> Texts:
    return open_texts(find_dataset(str(name)))


def documents(texts: Texts) -> list[str]:
    return [texts.text(index) for index in range(texts.bounds[-1])]


def sha256(texts: list[str]) -> str:
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()


@pytest.mark.parametrize("name", SCHEMAS)
class TestBuiltIn:
    def records(self, name: str) -> list[dict]:
        (path,) = find_dataset(name).paths
        return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]

    def test_schema(self, name):
        records = self.records(name)
        for record in records:
            assert {key: type(value) for key, value in record.items() if key in SCHEMAS[name]} == SCHEMAS[name]
        assert len({record["id"] for record in records}) == len(records)

    def test_is_large_and_varied(self, name):
        texts = [record["text"] for record in self.records(name)]
        assert sum(len(text.encode()) for text in texts) >= 30_000
        assert len(set(texts)) == len(texts) >= 10
        words = " ".join(texts).lower().split()
        assert len(set(words)) > len(words) / 6
        openings = [text[:60] for text in texts]
        assert len(set(openings)) == len(openings)

    def test_loads_as_it_is(self, name):
        assert documents(opened(name)) == [record["text"] for record in self.records(name)]


def test_python_docs_are_the_interpreters_own():
    texts = documents(opened("python-docs"))
    assert sorted(texts) == sorted(pydoc_data.topics.topics.values())
    assert sum(map(len, texts)) > 30_000


def test_digests_tell_corpora_apart():
    found = [opened(name) for name in DATASETS]
    assert len({texts.digest for texts in found}) == 3
    for texts in found:
        assert texts.digest == sha256(documents(texts))


TEXTS = ["first", "zweiter mit ß", "三番目", 'with "quotes"\nand lines\u2028', ""]
LINES = "".join(json.dumps({"text": text, "n": i}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(TEXTS))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_json_lines(tmp_path, suffix, ending):
    path = tmp_path / f"mine{suffix}"
    content = ("\n   \n" + LINES + "\x0c\n" + LINES.rstrip()).replace("\n", ending).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    texts = opened(path)
    assert documents(texts) == TEXTS * 2 and texts.digest == sha256(TEXTS * 2)
    assert [texts.text(index) for index in (3, 0, 9)] == [TEXTS[3], TEXTS[0], TEXTS[4]]


TYPES = {
    "string": pa.string(),
    "large string": pa.large_string(),
    "view": pa.string_view(),
    "dictionary": pa.dictionary(pa.int32(), pa.string()),
}


@pytest.mark.parametrize("kind", TYPES)
@pytest.mark.parametrize("rows", [1, 2, 100], ids="{}-row-groups".format)
def test_parquet(tmp_path, kind, rows):
    path = tmp_path / "mine.parquet"
    column = pa.array(TEXTS, pa.string()).cast(TYPES[kind])
    pq.write_table(pa.table({"id": range(len(TEXTS)), "text": column}), path, row_group_size=rows)
    texts = opened(path)
    assert documents(texts) == pd.read_parquet(path)["text"].tolist() == TEXTS
    assert texts.digest == sha256(TEXTS)
    assert texts.bounds.tolist() == [*range(0, len(TEXTS), rows), len(TEXTS)]
    assert [texts.text(index) for index in (3, 0, 4)] == [TEXTS[3], TEXTS[0], TEXTS[4]]


def test_parquet_as_pandas_writes_it(tmp_path):
    path = tmp_path / "mine.parquet"
    pd.DataFrame({"text": TEXTS}, index=[5, 4, 3, 2, 1]).to_parquet(path, compression="gzip")
    assert documents(opened(path)) == TEXTS


BAD = {
    "no JSON": b'{"text": "a"',
    "a list": b'["text"]',
    "a number": b"3",
    "no text": b'{"body": "a"}',
    "text that is none": b'{"text": 3}',
    "text that is null": b'{"text": null}',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "an unpaired surrogate": b'{"text": "\\ud800"}',
    "a huge number": b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
    "too deep": b"[" * 100_000,
    "a byte order mark": b'\xef\xbb\xbf{"text": "a"}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_by_its_number(tmp_path, name):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n{"text": "fine too"}\n' + BAD[name] + b'\n{"text": "never reached"}\n')
    with pytest.raises(ConfigError, match=r"mine\.jsonl, line 4") as caught:
        opened(path)
    assert "\n" not in str(caught.value)


def gzipped(damage: str) -> bytes:
    whole = bytearray(gzip.compress(random.Random(0).randbytes(3000).hex().encode()))
    if damage == "cut short":
        return bytes(whole[:500])
    if damage == "flipped":
        whole[200:260] = bytes(255 - b for b in whole[200:260])
        return bytes(whole)
    return {"not gzip": LINES.encode(), "empty": b""}[damage]


@pytest.mark.parametrize("damage", ["cut short", "flipped", "not gzip", "empty"])
def test_a_damaged_archive_is_refused(tmp_path, damage):
    path = tmp_path / "mine.jsonl.gz"
    path.write_bytes(gzipped(damage))
    with pytest.raises(ConfigError, match=r"mine\.jsonl\.gz"):
        opened(path)


def test_no_room_to_unpack_is_said(tmp_path, monkeypatch):
    """/dev/full is a disk without room: every write to it fails."""
    (tmp_path / "mine.jsonl.gz").write_bytes(gzip.compress(LINES.encode()))
    monkeypatch.setattr(
        "binade.collector.datasets.texts.tempfile.TemporaryFile",
        lambda: open("/dev/full", "r+b", buffering=0),  # noqa: SIM115
    )
    with pytest.raises(ConfigError, match=f"cannot be unpacked in .*{os.strerror(errno.ENOSPC)}.*TMPDIR"):
        opened(tmp_path / "mine.jsonl.gz")


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"], ids=["empty", "blank"])
def test_a_file_without_documents_is_refused(tmp_path, content):
    (tmp_path / "mine.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="contains no documents"):
        opened(tmp_path / "mine.jsonl")


COLUMNS = {
    "no text": ({"body": ["a"]}, "one column 'text': its columns are body"),
    "no column": ({}, "one column 'text': its columns are none"),
    "numbers": ({"text": [1, 2]}, "column 'text' contains int64"),
    "bytes": ({"text": [b"a"]}, "column 'text' contains binary"),
    "lists": ({"text": [["a"]]}, "column 'text' contains list"),
    "null": ({"text": pa.array(["a", None], pa.string())}, "row 2 has no text: null"),
    "no row": ({"text": pa.array([], pa.string())}, "contains no documents"),
}


@pytest.mark.parametrize("name", COLUMNS)
def test_a_parquet_without_texts_is_refused(tmp_path, name):
    columns, said = COLUMNS[name]
    pq.write_table(pa.table(columns), tmp_path / "mine.parquet")
    with pytest.raises(ConfigError, match=said):
        opened(tmp_path / "mine.parquet")


def test_a_parquet_that_is_not_utf8_is_refused(tmp_path):
    column = pa.Array.from_buffers(
        pa.string(), 2, [None, pa.py_buffer(b"\0\0\0\0\1\0\0\0\3\0\0\0"), pa.py_buffer(b"a\xff\xfe")]
    )
    pq.write_table(pa.table({"text": column}), tmp_path / "mine.parquet")
    with pytest.raises(ConfigError, match=r"mine\.parquet, row 2 is not UTF-8"):
        opened(tmp_path / "mine.parquet")


def test_a_damaged_parquet_is_refused(tmp_path):
    path, chance = tmp_path / "mine.parquet", random.Random(0)
    table = pa.table({"text": [f"document {i}" * i for i in range(50)]})
    pq.write_table(table, path, row_group_size=10, write_page_checksum=True)
    whole = path.read_bytes()
    for content in (b"", whole[:-1], whole[: len(whole) // 2], whole[len(whole) // 2 :], LINES.encode()):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"mine\.parquet cannot be read"):
            opened(path)
    refusals = []
    for _ in range(100):  # many bytes are of statistics and indices, which change no text
        content = bytearray(whole)
        content[chance.randrange(len(whole))] ^= 1 << chance.randrange(8)
        path.write_bytes(content)
        try:
            read = documents(opened(path))
        except ConfigError as error:
            refusals.append(str(error))
        else:
            assert read == table["text"].to_pylist()
    assert len(refusals) > 10 and all("mine.parquet" in refusal for refusal in refusals)


@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_a_file_that_cannot_be_opened_is_refused(tmp_path, suffix):
    for path in (tmp_path / f"gone.{suffix}", tmp_path):
        with pytest.raises(ConfigError, match=r"does not exist|unknown dataset"):
            find_dataset(str(path))
    path = tmp_path / f"mine.{suffix}"
    path.write_bytes(b"")
    source = find_dataset(str(path))
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        open_texts(source)


def test_a_file_that_changes_under_way_is_noticed(tmp_path):
    path = tmp_path / "mine.jsonl"
    path.write_text(LINES)
    texts = opened(path)
    with open(path, "r+b") as file:
        file.truncate(30)
    assert texts.text(0) == TEXTS[0]
    with pytest.raises(DataError, match=r"mine\.jsonl, byte .* changed while it was in use"):
        texts.text(2)
    path.write_text(LINES)
    assert documents(opened(path)) == TEXTS  # read anew


COUNT, LENGTH = 40_000, 1000


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """A directory with 4 MB and 40 MB of text in each format, in row groups of 0.5 MB."""
    place = tmp_path_factory.mktemp("large")
    for name, count in (("small", COUNT // 10), ("large", COUNT)):
        texts = [f"{i:07d} " * (LENGTH // 8) for i in range(count)]
        content = "".join(json.dumps({"text": text}) + "\n" for text in texts).encode()
        (place / f"{name}.jsonl").write_bytes(content)
        (place / f"{name}.jsonl.gz").write_bytes(gzip.compress(content, 1))
        pq.write_table(pa.table({"text": texts}), place / f"{name}.parquet", row_group_size=500)
    return place


GROWTH = """
import sys
from binade.collector.datasets.inputs import find_dataset
from binade.collector.datasets.texts import open_texts
def peak():
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("VmHWM:"))
open_texts(find_dataset(sys.argv[1]))
before = peak()
texts = open_texts(find_dataset(sys.argv[2]))
assert texts.bounds[-1] == 40_000 and texts.text(39_999).startswith("0039999 ") and texts.text(7).startswith("0000007 ")
print(peak() - before)
"""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])
def test_memory_holds_no_texts(large, suffix):
    """The peak of a process's memory grows less than the file that it reads. Arrow's own allocator would keep back what
    was given back, at times over 10 MB: the system's is measured."""
    files = (large / f"small.{suffix}", large / f"large.{suffix}")
    done = run_python("-c", GROWTH, *files, env={"ARROW_DEFAULT_MEMORY_POOL": "system"})
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < COUNT * LENGTH / 4


def test_a_process_scans_a_file_once(large):
    path = large / "small.jsonl"
    os.utime(path)
    fresh = opened(path)
    assert opened(path) is not fresh  # it may still change within the clock's resolution
    for seconds in (100, 200):
        os.utime(path, (seconds, seconds))
        texts = opened(path)
        assert texts is not fresh and opened(path) is texts
        fresh = texts
