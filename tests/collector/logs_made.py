"""Tensor logs as other tools write them: real files, from tensors that a test knows."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from binade.collector.imports.file_rows import FileJob, FileRead, read_file

# One name of each version, and the words that it must give.
NAMES = {
    "V0": "mxfp8/20250908_092156_0001_attention_L1_forward_mxfp8_query.pt",
    "V1": "20250908_095220_0001_attention_L0_forward_pre_FA_mxfp8_query.pt",
    "V2": "20250912_101010_0001_iter000_attention_L1_forward_pre_FA_hifp8_rank00_sample000_group000_query.pt",
    "V3": "bf16/20250923_100149_0019_iter000_linear_L1_forward_pre_linear_bf16_rank00_group000_input_B.pt",
    "V4": "20250923_100150_0019_iter000_attention_L1_forward_pre_FA_mxfp8_rank00_sample000_query.pt",
    "V5a": "20250924_100150_iter000_attention_L1_forward_bf16_rank00_sample000_group000_query.pt",
    "V5c": "20250914_190408_0000_iter004_L1_attention_forward_bf16_rank04_sample0_group001_query.pt",
    "V6": "20251223_101500_iter000_linear_L1_forward_pre_linear_mxfp8_rank00_input.pt",
    "V7": "debug_tensors/iter_1/fwd_in_140213.pt",
}


def tensor(seed: int, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(shape or (6, 70), generator=torch.Generator().manual_seed(seed)).to(dtype)


def write(path: Path, x: Tensor, metadata: dict[str, Any] | None = None, *, older: bool = False) -> Path:
    """One log: a dict as that tool writes it, or the bare tensor without metadata."""
    path.parent.mkdir(parents=True, exist_ok=True)
    content = x if metadata is None else {"tensor": x, "tensor_info": {"shape": list(x.shape)}, "metadata": metadata}
    torch.save(content, path, _use_new_zipfile_serialization=not older)
    return path


def write_all(directory: Path, *, older: bool) -> dict[str, Tensor]:
    """A log of each version; the tensors by the absolute path of their file."""
    made = {}
    for seed, (version, name) in enumerate(NAMES.items()):
        x = tensor(seed, dtype=torch.float32 if seed % 2 else torch.bfloat16)
        made[str(write(directory / name, x, None if version == "V7" else {}, older=older))] = x
    return made


def read_here(
    jobs: Iterable[FileJob], read: Callable[[FileJob], FileRead], count: int
) -> Iterator[tuple[FileJob, FileRead]]:
    """In place of the importer's `scatter`: a process that reads takes longer to start than all else."""
    return ((job, read(job)) for job in jobs)


def deadly_read(job: FileJob) -> FileRead:
    """As the import reads, but a file named killed or crashed kills its reader, as running out of memory does."""
    if "killed" in job.file.name:
        os.kill(os.getpid(), signal.SIGKILL)
    if "crashed" in job.file.name:
        os.kill(os.getpid(), signal.SIGSEGV)
    return read_file(job)


def cut_while_read(path: str) -> float:
    """The sum of a memory-mapped tensor whose file is emptied meanwhile, unless it is a number to be doubled."""
    if path.isdigit():
        return 2.0 * int(path)
    x = torch.load(path, weights_only=True, mmap=True)
    os.truncate(path, 0)
    return float(x.sum())
