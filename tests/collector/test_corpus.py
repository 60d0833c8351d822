"""Corpora: the built-in ones' schemas, files of one's own, what is refused, and the stream of samples."""

from __future__ import annotations

import gzip
import hashlib
import json
import pydoc_data.topics
import random
import string

import pytest
import torch

from collector.config import DATASETS, ConfigError
from collector.corpus import BUILT_IN, END_OF_DOCUMENT, Corpus, SampleStream, load_corpus

# The keys of the published data sets: Hugging Face's wikimedia/wikipedia and allenai/dolma.
SCHEMAS = {
    "wikipedia": {"id": str, "url": str, "title": str, "text": str},
    "dolma": {"id": str, "text": str, "source": str, "added": str, "created": str, "metadata": dict},
}


@pytest.mark.parametrize("name", SCHEMAS)
class TestBuiltIn:
    def records(self, name: str) -> list[dict]:
        return [json.loads(line) for line in (BUILT_IN / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]

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
        corpus = load_corpus(name)
        assert list(corpus.documents) == [record["text"] for record in self.records(name)]
        assert corpus.name == name and corpus == load_corpus(name)


def test_python_docs_are_the_interpreters_own():
    corpus = load_corpus("python-docs")
    assert sorted(corpus.documents) == sorted(pydoc_data.topics.topics.values())
    assert sum(map(len, corpus.documents)) > 30_000


def test_digests_tell_corpora_apart():
    corpora = [load_corpus(name) for name in DATASETS]
    assert len({corpus.digest for corpus in corpora}) == 3
    for corpus in corpora:
        assert corpus.digest == hashlib.sha256("\0".join(corpus.documents).encode()).hexdigest()


TEXTS = ["first", "zweiter mit ß", "三番目", 'with "quotes"\nand lines\u2028', ""]
LINES = "".join(json.dumps({"text": text, "n": i}, ensure_ascii=i % 2 == 0) + "\n" for i, text in enumerate(TEXTS))


@pytest.mark.parametrize("ending", ["\n", "\r\n"])
@pytest.mark.parametrize("suffix", [".jsonl", ".jsonl.gz"])
def test_files_of_ones_own(tmp_path, suffix, ending):
    path = tmp_path / f"mine{suffix}"
    content = ("\n   \n" + LINES).replace("\n", ending).encode()
    path.write_bytes(gzip.compress(content) if suffix.endswith("gz") else content)
    corpus = load_corpus(str(path))
    assert list(corpus.documents) == TEXTS and corpus.name == str(path)


BAD = {
    "no JSON": b'{"text": "a"',
    "a list": b'["text"]',
    "a number": b"3",
    "no text": b'{"body": "a"}',
    "text that is none": b'{"text": 3}',
    "text that is null": b'{"text": null}',
    "not UTF-8": b'{"text": "\xff\xfe"}',
    "half a surrogate pair": b'{"text": "\\ud800"}',
    "a huge number": b'{"text": "a", "n": ' + b"9" * 5000 + b"}",
    "too deep": b"[" * 100_000,
    "a byte order mark": b'\xef\xbb\xbf{"text": "a"}',
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_line_is_named_by_its_number(tmp_path, name):
    path = tmp_path / "mine.jsonl"
    path.write_bytes(b'{"text": "fine"}\n\n{"text": "fine too"}\n' + BAD[name] + b'\n{"text": "never reached"}\n')
    with pytest.raises(ConfigError, match="mine.jsonl, line 4") as caught:
        load_corpus(str(path))
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
    with pytest.raises(ConfigError, match="mine.jsonl.gz"):
        load_corpus(str(path))


@pytest.mark.parametrize("content", [b"", b"\n\n  \n"], ids=["empty", "blank"])
def test_a_file_without_documents_is_refused(tmp_path, content):
    (tmp_path / "mine.jsonl").write_bytes(content)
    with pytest.raises(ConfigError, match="holds no document"):
        load_corpus(str(tmp_path / "mine.jsonl"))


def test_a_missing_file_and_a_directory_are_refused(tmp_path):
    (tmp_path / "dir.jsonl").mkdir()
    for path in (tmp_path / "gone.jsonl", tmp_path / "dir.jsonl"):
        with pytest.raises(ConfigError, match="cannot be read"):
            load_corpus(str(path))


class TestStream:
    def test_the_same_seed_gives_the_same_batches(self):
        corpus = load_corpus("wikipedia")
        first, second, other = (SampleStream(corpus, 64, seed) for seed in (1, 1, 2))
        batches = [(first.batch(3), second.batch(3), other.batch(3)) for _ in range(5)]
        assert all(torch.equal(a[i], b[i]) for a, b, _ in batches for i in (0, 1))
        assert not any(torch.equal(a[0], c[0]) for a, _, c in batches)

    def test_samples_are_text_and_labels_the_next_byte(self):
        corpus = Corpus("x", ("The quick brown fox", "jumps över the lazy dog"), "")
        tokens, labels = SampleStream(corpus, 7, 0).batch(4)
        assert tokens.shape == labels.shape == (4, 7) and tokens.dtype == torch.int64
        assert torch.equal(tokens[:, 1:], labels[:, :-1])
        joined = "\x00".join(corpus.documents), "\x00".join(corpus.documents[::-1])
        for row, last in zip(tokens.tolist(), labels[:, -1].tolist(), strict=True):
            text = bytes(0 if token == END_OF_DOCUMENT else token for token in [*row, last])
            assert any(text in (order + "\x00").encode() for order in joined)

    def test_an_epoch_shows_every_sample_once(self):
        corpus = Corpus("x", ("".join(random.Random(0).choices(string.ascii_letters, k=200)),), "")
        stream = SampleStream(corpus, 10, 0)
        for _ in range(3):
            rows = torch.cat([stream.batch(4)[0] for _ in range(5)]).tolist()
            assert len({tuple(row) for row in rows}) == 20
            text = corpus.documents[0].encode()
            assert sorted(map(bytes, rows)) == sorted(text[i : i + 10] for i in range(0, 200, 10))

    @pytest.mark.parametrize("documents", [("a",), ("",), ("ab", "", "c")])
    def test_a_short_corpus_is_repeated(self, documents):
        tokens, labels = SampleStream(Corpus("x", documents, ""), 50, 0).batch(2)
        assert tokens.shape == (2, 50) and int(tokens.max()) == END_OF_DOCUMENT
