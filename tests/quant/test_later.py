"""Results that the host reads later: made once, with one copy for each stream that computed them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from binade.quant.later import Later, LaterPart, fetch, fetched_nbytes

CUDA = pytest.param("cuda", marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")])


@pytest.mark.parametrize("device", ["cpu", CUDA])
def test_made_once_of_any_dtype_and_shape(device):
    made = []
    tensors = [torch.arange(5, device=device), torch.tensor(2.5, dtype=torch.float64, device=device)]
    tensors += [torch.ones(2, 3, device=device)[:, 1], torch.zeros(0, device=device)]
    results = [Later(lambda x: made.append(x) or x, LaterPart(tensor)) for tensor in tensors]
    both = Later(lambda a, b: float(a.sum() + b), results[0], results[1])
    doubled = both.map(lambda value: 2 * value)
    fetch([doubled, *results])()
    assert doubled() == 25.0 and doubled() == 25.0 and both() == 12.5
    for result, tensor in zip(results, tensors, strict=True):
        assert np.array_equal(result(), tensor.cpu().numpy())
    assert len(made) == len(tensors) and fetched_nbytes(results) == 0


def test_many_results_are_fetched_in_pieces(monkeypatch):
    monkeypatch.setattr("binade.quant.later.PACKED", 100)
    results = [Later(lambda x: int(x.sum()), LaterPart(torch.full((10,), number))) for number in range(50)]
    fetch(results)()
    assert [result() for result in results] == [10 * number for number in range(50)]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_what_a_side_stream_computes_is_waited_for():
    """The default stream, on which the copy is asked for, is idle long before the side stream is done."""
    side, x = torch.cuda.Stream(), torch.zeros(1 << 20, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        result = Later(lambda values: float(values.sum()), LaterPart(x + 1))
    alone = Later(lambda values: float(values.sum()), LaterPart(x + 2))
    arrived = fetch([result, alone])
    assert not side.query()
    arrived()
    assert (result(), alone()) == (1 << 20, 2 << 20)


def test_odd_sizes_are_packed_and_read_at_any_offset(monkeypatch):
    """float32 scalars between float64: what is fetched on an accelerator, through a stream that is not there."""

    class Stream:
        def __enter__(self):
            return self

        def __exit__(self, *error):
            pass

    stream, parts = (
        Stream(),
        [LaterPart(x) for x in (torch.tensor(1.5), torch.arange(3.0).double(), torch.ones(5), torch.tensor(7))],
    )
    for part in parts:
        part.stream = stream
    results = [Later(lambda x: x.copy(), part) for part in parts]
    arrived = fetch(results)
    parts[2].arrive(parts[2].tensor.numpy())  # by the other thread, which had fetched it alone
    arrived()
    assert [result().tolist() for result in results] == [1.5, [0.0, 1.0, 2.0], [1.0] * 5, 7]
    fetch(results)()
