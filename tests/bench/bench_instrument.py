"""What instrumentation costs on an iteration that it neither quantizes nor records: the time of that iteration, divided
by that of the same model without instrumentation.

    python -m tests.bench.bench_instrument [--repeats 120] [--layers 2] [--hidden 512] [--length 128] [--compile]

Forward, backward and the recorder's step of a Llama of transformers and of collector's own, with bfloat16 activations,
on one thread. An instrumented model and a plain copy of it take turns, so that a machine that slows down slows both;
each ratio is the median of the pairs' ratios. "switched off" has a Recorder with enabled=False, "not recorded" an
iteration after the last that is recorded.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import replace

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from binade.collector import Recorder, instrument
from binade.collector.models.model import GPTModel
from binade.collector.models.registry import MODELS

WARMUP = 5  # pairs; an instrumented model's first pass is watched


def hugging_face(layers: int, hidden: int) -> tuple[nn.Module, Callable]:
    config = LlamaConfig(
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config).bfloat16(), lambda model, tokens: model(tokens, labels=tokens, use_cache=False).loss


def own(layers: int, hidden: int) -> tuple[nn.Module, Callable]:
    shape = replace(
        MODELS["llama32-1b"]["tiny"],
        layers=layers,
        hidden=hidden,
        ffn=4 * hidden,
        heads=hidden // 64,
        kv_heads=hidden // 128,
        head_dim=64,
    )
    model = GPTModel(shape)
    model.initialize(0)
    return model, lambda model, tokens: model(tokens).float().square().mean()


def iteration(model: nn.Module, loss: Callable, tokens: torch.Tensor, recorder: Recorder | None) -> float:
    start = time.perf_counter()
    loss(model, tokens).backward()
    if recorder:
        recorder.step()
    return time.perf_counter() - start


def compare(
    model: nn.Module, loss: Callable, tokens: torch.Tensor, recorder: Recorder | None, given: argparse.Namespace
) -> tuple[float, float, float]:
    """Median seconds of a plain and of an instrumented iteration, and the median of the pairs' ratios."""
    plain, pairs, repeats = deepcopy(model), list[tuple[float, float]](), given.repeats
    if given.compile:
        model, plain = torch.compile(model), torch.compile(plain)
    with instrument(model, "bf16", recorder):
        for turn in range(repeats + WARMUP):
            times = {}
            for instrumented in (turn % 2 == 0, turn % 2 == 1):
                each = model if instrumented else plain
                times[instrumented] = iteration(each, loss, tokens, recorder if instrumented else None)
            pairs.append((times[False], times[True]))
    plain_times, instrumented_times = zip(*pairs[WARMUP:], strict=True)
    return (
        statistics.median(plain_times),
        statistics.median(instrumented_times),
        statistics.median(b / a for a, b in pairs[WARMUP:]),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("repeats", 120), ("layers", 2), ("hidden", 512), ("length", 128)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--compile", action="store_true")
    given = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokens = torch.randint(256, (1, given.length))
    print(f"torch {torch.__version__}, {given.layers} layers, hidden {given.hidden}, {given.length} tokens, 1 thread")
    with tempfile.TemporaryDirectory() as root:
        for name, make in (("transformers Llama", hugging_face), ("own Llama", own))[: 1 if given.compile else 2]:
            model, loss = make(given.layers, given.hidden)
            off = Recorder(root, enabled=False)
            with Recorder(root, iterations=0) as past, off:
                for word, recorder in (("no recorder", None), ("switched off", off), ("not recorded", past)):
                    plain, instrumented, ratio = compare(model, loss, tokens, recorder, given)
                    print(f"{name:<20}{word:<14}{plain * 1e3:8.2f} ms  {instrumented * 1e3:8.2f} ms  ratio {ratio:.4f}")


if __name__ == "__main__":
    main()
