"""What `binade.audit` of block-FP8 weights takes, against one plain pass of dequantization, and its peak memory.

    python -m tests.bench.bench_audit [--size 4096] [--weights 1 4]

Each line is a process of its own that audits a checkpoint against its original. ratio = its processor time, without
imports, over that of torch for reading the same codes and multiplying them by their scales, in the same process.
memory = the most resident memory beyond that after an audit of a tiny checkpoint, in units of one weight as float32.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

import binade

TILE, TINY = 128, 256


def make(folder: Path, size: int, weights: int) -> Path:
    """`original` and `quantized` with so many weights, each in a file of its own: the scale is absmax / 448, x is
    divided by it, as in DeepSeek-V3's kernel."""
    settings = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [TILE, TILE]}}
    files: dict[str, str] = {}
    for part in ("original", "quantized"):
        (folder / part).mkdir(parents=True)
        (folder / part / "config.json").write_text(json.dumps(settings if part == "quantized" else {}))
    for layer in range(weights):
        x = torch.randn(size, size, generator=torch.Generator().manual_seed(layer)).mul(0.02).bfloat16()
        tiles = x.float().reshape(size // TILE, TILE, size // TILE, TILE)
        scale = tiles.abs().amax((1, 3)) / 448
        codes = (tiles / scale[:, None, :, None]).to(torch.float8_e4m3fn).reshape(size, size)
        name, file = f"model.layers.{layer}.mlp.down_proj.weight", f"{layer}.safetensors"
        save_file({name: x}, folder / "original" / file)
        save_file({name: codes, f"{name}_scale_inv": scale}, folder / "quantized" / file)
        files[name] = file
    for part in ("original", "quantized"):
        (folder / part / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


def plain(folder: Path) -> None:
    """Each weight dequantized once by torch."""
    for file in sorted((folder / "quantized").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            name = min(opened.keys(), key=len)
            scale = opened.get_tensor(f"{name}_scale_inv").repeat_interleave(TILE, 0).repeat_interleave(TILE, 1)
            opened.get_tensor(name).float() * scale


def most() -> int:
    """The most resident memory of this process so far, in bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def measure(folder: Path, size: int) -> None:
    """In a fresh process."""
    binade.audit(folder / "tiny" / "quantized", folder / "tiny" / "original", folder / "runs")
    before, start = most(), time.process_time()
    binade.audit(folder / "large" / "quantized", folder / "large" / "original", folder / "runs")
    seconds, memory = time.process_time() - start, (most() - before) / (4 * size * size)
    passes = []
    for _ in range(3):
        start = time.process_time()
        plain(folder / "large")
        passes.append(time.process_time() - start)
    once = sorted(passes)[1]
    print(f"{seconds:9.2f}  {once:9.3f}  {seconds / once:7.1f}  {memory:7.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--weights", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        measure(arguments.measure, arguments.size)
        return
    print(f"{arguments.size}×{arguments.size}\nweights    seconds      plain    ratio   memory")
    for count in arguments.weights:
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            make(folder / "tiny", TINY, 1)
            make(folder / "large", arguments.size, count)
            line = [sys.executable, "-m", "tests.bench.bench_audit", "--measure", name, "--size", str(arguments.size)]
            printed = subprocess.run(line, check=True, capture_output=True, text=True).stdout
            print(f"{count:7}  {printed}", end="", flush=True)


if __name__ == "__main__":
    main()
