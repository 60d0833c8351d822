"""How fast `binade import` is, compared with reading and summarizing the same files in the same run.

    python -m tests.bench.bench_import
    python -m tests.bench.bench_import --files 2000 --values 16384     many small files

Both take turns on the same files, which are in the system's cache: a plain loop of torch.load(weights_only=True) and
quant.summarize in one process with all of torch's threads (with scores also quant.score in each format), and the whole
command's work with one process per core, from listing the directory to the last segment. ratio = MB per second of the
import, divided by those of the loop, both medians of the repeats. The start of the processes is included: the less
there is to read, the more it weighs.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
from pathlib import Path

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as `make bench` and the collector set it

import torch

from binade.collector.imports.importer import import_logs
from binade.collector.settings import DEFAULT_SCORES
from binade.quant import score, summarize
from tests.bench.bench_quantize import timed, versions


def make(directory: Path, files: int, values: int, dtype: torch.dtype, older: bool) -> int:
    """Logs of one tensor each, as the field's tool writes them; their size in bytes."""
    for number in range(files):
        g = torch.Generator().manual_seed(number)
        name = f"20250912_101010_{number:04d}_iter000_linear_L1_forward_pre_linear_mxfp8_rank00_group000_input.pt"
        metadata = {"layer_type": "linear", "layer_idx": 1, "operation": "forward", "quant_type": "mxfp8"}
        content = {"tensor": torch.randn(values // 128, 128, generator=g).to(dtype), "metadata": metadata}
        torch.save(content, directory / name, _use_new_zipfile_serialization=not older)
    return sum(path.stat().st_size for path in directory.iterdir())


def loop(directory: Path, scores: tuple[str, ...]) -> None:
    for path in directory.iterdir():
        x = torch.load(path, weights_only=True)["tensor"]
        summarize(x)
        for name in scores:
            score(x, name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=300)
    parser.add_argument("--values", type=int, default=1 << 20, help="of each file")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--no-scores", action="store_true", help="statistics and sketches only")
    parser.add_argument("--threads", type=int, default=2, help="of torch, in the loop")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    print(versions("cpu"), end="\n\n")
    print("| files | dtype | torch format | scores | loop, MB/s | import, MB/s | ratio |")
    print("|---|---|---|---|---|---|---|")
    for dtype in (torch.bfloat16, torch.float32):
        for older in (False, True):
            with tempfile.TemporaryDirectory() as scratch:
                logs = Path(scratch, "logs")
                logs.mkdir()
                size = make(logs, args.files, args.values, dtype, older) / 1e6
                for scores in ((),) if args.no_scores else ((), DEFAULT_SCORES):
                    loops, imports = [], []
                    for repeat in range(args.repeats):
                        root = Path(scratch, f"runs{len(scores)}{repeat}")
                        loops.append(timed(lambda: loop(logs, scores), "cpu"))  # noqa: B023
                        imports.append(
                            timed(lambda: import_logs(logs, root, scores=scores, say=lambda line: None), "cpu")  # noqa: B023
                        )
                    theirs, ours = size / statistics.median(loops), size / statistics.median(imports)
                    print(
                        f"| {args.files} × {size / args.files:.1f} MB | {str(dtype).removeprefix('torch.')} | "
                        f"{'older' if older else 'zip'} | {len(scores) or 'none'} | {theirs:.0f} | {ours:.0f} | "
                        f"{ours / theirs:.2f} |",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
