"""The stream of samples: its order, its epochs, its readers, its hash; and token ids that the model does not have."""

from __future__ import annotations

import hashlib
import itertools
import random
import string
from collections import Counter
from dataclasses import replace
from typing import ClassVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from binade.collector.datasets.loading import TokenizedTexts, open_dataset
from binade.collector.datasets.samples import SampleStream
from binade.collector.datasets.texts import ListedTexts
from binade.collector.datasets.tokenizer import BYTES, END_OF_DOCUMENT
from binade.collector.errors import ConfigError, DataError
from binade.collector.training.config import RunConfig
from binade.collector.training.loop import open_stream
from binade.collector.training.plan import plan
from tests.collector.files import train_tokenizer, write_pair


def in_bytes(*texts: str) -> TokenizedTexts:
    return TokenizedTexts("mine", ListedTexts(texts), BYTES)


def row(stream: SampleStream, batches: int, size: int) -> list[int]:
    """The tokens of some batches end to end."""
    return torch.cat([stream.batch(size)[0].flatten() for _ in range(batches)]).tolist()


def epochs(tokens: list[int], documents: int) -> list[list[str]]:
    """Byte tokens as documents, so many an epoch; the last epoch may be cut short."""
    text = bytes(0 if token == END_OF_DOCUMENT else token for token in tokens).decode(errors="replace")
    whole = text.split("\0")[:-1]
    return [whole[start : start + documents] for start in range(0, len(whole), documents)]


class TestOrder:
    TEXTS: ClassVar = [f"{letter}{i}" * (i % 7) for i, letter in enumerate(string.ascii_letters)]

    def test_the_same_seed_gives_the_same_batches(self):
        documents = open_dataset("wikipedia", None, 384).documents
        first, second, other = (SampleStream(documents, 64, seed) for seed in (1, 1, 2))
        batches = [(first.batch(3), second.batch(3), other.batch(3)) for _ in range(5)]
        assert all(torch.equal(a[i], b[i]) for a, b, _ in batches for i in (0, 1))
        assert not any(torch.equal(a[0], c[0]) for a, _, c in batches)

    def test_labels_are_the_next_tokens(self):
        stream = SampleStream(in_bytes(*self.TEXTS), 7, 0)
        batches = [stream.batch(4) for _ in range(9)]
        for tokens, labels in batches:
            assert tokens.shape == labels.shape == (4, 7) and tokens.dtype == labels.dtype == torch.int64
        tokens, labels = (torch.cat([batch[i].flatten() for batch in batches]) for i in (0, 1))
        assert torch.equal(tokens[1:], labels[:-1])

    def test_the_size_of_batches_changes_nothing(self):
        rows = [row(SampleStream(in_bytes(*self.TEXTS), 5, 3), *shape) for shape in ((60, 1), (20, 3), (1, 60))]
        assert rows[0] == rows[1] == rows[2]

    def test_an_epoch_shows_every_document_once(self):
        tokens = row(SampleStream(in_bytes(*self.TEXTS), 10, 0), 60, 4)
        found = epochs(tokens, len(self.TEXTS))
        assert len(found) >= 4
        assert all(Counter(epoch) == Counter(self.TEXTS) for epoch in found[:-1])
        assert len({tuple(epoch) for epoch in found[:-1]}) == len(found) - 1  # each in an order of its own
        assert self.TEXTS not in found

    def test_row_groups_of_parquet_stay_together(self, tmp_path):
        texts = [f"document {i}" for i in range(60)]
        pq.write_table(pa.table({"text": texts}), tmp_path / "x.parquet", row_group_size=10)
        stream = SampleStream(open_dataset(str(tmp_path / "x.parquet"), None, 384).documents, 10, 0)
        found = epochs(row(stream, 100, 2), 60)
        for epoch in found[:2]:
            assert Counter(epoch) == Counter(texts)
            groups = [[int(text.split()[1]) for text in epoch[start : start + 10]] for start in range(0, 60, 10)]
            assert all(len({number // 10 for number in group}) == 1 for group in groups)
            assert not any(group == sorted(group) for group in groups)
        assert found[0] != found[1]

    @pytest.mark.parametrize("texts", [("a",), ("",), ("ab", "", "c")])
    def test_a_short_dataset_is_repeated(self, texts):
        tokens = row(SampleStream(in_bytes(*texts), 50, 0), 1, 2)
        assert all(Counter(epoch) == Counter(texts) for epoch in epochs(tokens, len(texts))[:-1])

    @pytest.mark.parametrize("end", ["<eos>", None])
    def test_documents_of_a_tokenizer_end_with_its_end_token(self, tmp_path, end):
        text = "ended by its own token, or by none"
        tokenizer = train_tokenizer([text], 300, [end] if end else [])
        tokenizer.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "x.jsonl").write_text(f'{{"text": "{text}"}}\n')
        dataset = open_dataset(str(tmp_path / "x.jsonl"), str(tmp_path), 384)
        ids = tokenizer.encode(text).ids + ([tokenizer.token_to_id(end)] if end else [])
        tokens = row(SampleStream(dataset.documents, 16, 0), 4, 2)
        assert tokens == list(itertools.islice(itertools.cycle(ids), len(tokens)))

    def test_documents_that_are_all_empty_are_refused(self, tmp_path):
        train_tokenizer([], 300).save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "x.jsonl").write_text('{"text": ""}\n' * 3)
        config = RunConfig(dataset=str(tmp_path / "x.jsonl"), tokenizer=str(tmp_path))
        dataset = open_dataset(config.dataset, config.tokenizer, 384)
        with pytest.raises(DataError, match="contains no token"):
            SampleStream(dataset.documents, 8, 0)
        with pytest.raises(ConfigError, match="contains no token"):
            open_stream(plan(config), dataset)


class TestReaders:
    @pytest.mark.parametrize("ranks", [1, 2, 3])
    @pytest.mark.parametrize("size", [1, 3])
    @pytest.mark.parametrize("kind", ["text", "bin"])
    def test_ranks_share_the_batches_of_one(self, tmp_path, kind, size, ranks):
        """Batch i of rank r is batch i * ranks + r of a single reader, whatever ends in between."""
        if kind == "text":
            documents = in_bytes("The quick brown fox", "", "jumps över the lazy dog" * 9, "again")
        else:
            tokens = [[list(range(i, i * 2))] for i in range(20)]
            documents = open_dataset(str(write_pair(tmp_path / "x", tokens)), None, 384).documents
        alone = SampleStream(documents, 11, 5)
        whole = [alone.batch(size) for _ in range(12 * ranks)]
        for rank in range(ranks):
            stream = SampleStream(documents, 11, 5, rank=rank, ranks=ranks)
            for i in range(12):
                for ours, theirs in zip(stream.batch(size), whole[i * ranks + rank], strict=True):
                    assert torch.equal(ours, theirs)


class TestDigest:
    def test_covers_tokens_and_labels_in_order(self):
        stream = SampleStream(open_dataset("dolma", None, 384).documents, 32, 0)
        sha = hashlib.sha256()
        assert stream.digest() == sha.hexdigest()
        for _ in range(3):
            for ids in stream.batch(2):
                sha.update(ids.contiguous().numpy().astype("<i8").tobytes())
            assert stream.digest() == sha.hexdigest()

    def test_tells_seeds_apart(self):
        documents = open_dataset("dolma", None, 384).documents
        digests = []
        for seed in (0, 1, 2**63 - 1):
            stream = SampleStream(documents, 32, seed)
            stream.batch(2)
            digests.append(stream.digest())
        assert len(set(digests)) == 3


class TestIds:
    CONFIG = RunConfig(sequence_length=8, micro_batch_size=2, micro_batches=2, warmup_iterations=1, control_iter=2)

    def open(self, tmp_path, tokens: list[int], **changes) -> SampleStream:
        config = replace(self.CONFIG, dataset=str(write_pair(tmp_path / "x", [[tokens]], np.int64)), **changes)
        return open_stream(plan(config), open_dataset(config.dataset, None, plan(config).shape.vocab))

    def test_the_largest_id_of_the_vocabulary_is_fine(self, tmp_path):
        assert row(self.open(tmp_path, [0, 383]), 1, 1) == [0, 383] * 4

    @pytest.mark.parametrize(
        ("id", "said"),
        [
            (
                384,
                "x contains the token id 384, but the model's vocabulary has only 384 tokens: use --vocab-size 385",
            ),
            (2**62, "use --vocab-size"),
            (-1, "x contains the token id -1: expected non-negative ids"),
        ],
    )
    def test_an_id_beyond_it_is_refused(self, tmp_path, id, said):
        with pytest.raises(ConfigError, match=said):
            self.open(tmp_path, [5] * 20 + [id] + [7] * 20)
        if id == 384:
            self.open(tmp_path, [id], vocab_size=385)

    @pytest.mark.parametrize("ranks", [1, 2])
    def test_all_that_will_be_read_is_looked_at(self, tmp_path, ranks):
        """3 iterations of 2 micro-batches of 2 sequences of 8 tokens, and the last label: 97 tokens a rank."""
        read = 96 * ranks + 1
        for position, refused in ((read - 1, True), (read, False)):
            tokens = [5] * 500
            tokens[position] = 999
            config = replace(self.CONFIG, dataset=str(write_pair(tmp_path / "x", [[tokens]])))
            dataset = open_dataset(config.dataset, None, 384)
            if refused:
                with pytest.raises(ConfigError, match="token id 999"):
                    open_stream(plan(config), dataset, ranks=ranks)
            else:
                open_stream(plan(config), dataset, ranks=ranks)

    def test_more_tokens_than_are_looked_at_together(self, tmp_path, monkeypatch):
        monkeypatch.setattr("binade.collector.datasets.samples.CHUNK", 7)
        chance = random.Random(0)
        with pytest.raises(ConfigError, match="token id 900"):
            self.open(tmp_path, [chance.choice((3, 600, 900)) for _ in range(60)])
        self.open(tmp_path, [chance.randrange(384) for _ in range(60)])
