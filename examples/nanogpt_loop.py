"""A training loop like nanoGPT's, quantized and recorded with two additional lines.

    python examples/nanogpt_loop.py --recipe nvidia_nvfp4
    binade serve

The loop needs no other changes. estimate_loss runs in eval mode, so it is not recorded. Each of the other forward
passes is a micro-batch, and each optimizer step ends an iteration. The training text is this file.
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import binade

N_LAYER, N_HEAD, N_EMBD, BLOCK_SIZE, BATCH_SIZE, GRADIENT_ACCUMULATION = 2, 2, 64, 32, 4, 2


class CausalSelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.c_attn = nn.Linear(N_EMBD, 3 * N_EMBD)
        self.c_proj = nn.Linear(N_EMBD, N_EMBD)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.c_attn(x).unflatten(-1, (3, N_HEAD, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(y.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(N_EMBD), nn.LayerNorm(N_EMBD)
        self.attn = CausalSelfAttention()
        self.mlp = nn.ModuleDict({"c_fc": nn.Linear(N_EMBD, 4 * N_EMBD), "c_proj": nn.Linear(4 * N_EMBD, N_EMBD)})

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp["c_proj"](F.gelu(self.mlp["c_fc"](self.ln_2(x))))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(256, N_EMBD), nn.Embedding(BLOCK_SIZE, N_EMBD)
        self.h = nn.ModuleList(Block() for _ in range(N_LAYER))
        self.ln_f, self.lm_head = nn.LayerNorm(N_EMBD), nn.Linear(N_EMBD, 256, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        return F.cross_entropy(self.lm_head(self.ln_f(x)).flatten(0, 1), targets.flatten())


data = torch.tensor(list(Path(__file__).read_bytes()))


def get_batch() -> tuple[Tensor, Tensor]:
    starts = torch.randint(len(data) - BLOCK_SIZE, (BATCH_SIZE,))
    tokens = torch.stack([data[i : i + BLOCK_SIZE + 1] for i in starts])
    return tokens[:, :-1], tokens[:, 1:]


@torch.no_grad()
def estimate_loss(model: GPT) -> float:
    model.eval()
    losses = [model(*get_batch()).item() for _ in range(4)]
    model.train()
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--recipe", default="mxfp8", help="a recipe or format of `binade list`")
    parser.add_argument("--max-iters", type=int, default=10)
    given = parser.parse_args()
    torch.manual_seed(1337)
    model = GPT()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    recorder = binade.Recorder(label="nanogpt", config={"model": "nanogpt"}, iterations=2, micro_batches=1)  # 1
    with recorder, binade.instrument(model, given.recipe, recorder):  # 2
        for iter_num in range(given.max_iters):
            if iter_num % 5 == 0:
                print(f"iteration {iter_num}: loss {estimate_loss(model):.3f}")
            for _ in range(GRADIENT_ACCUMULATION):
                (model(*get_batch()) / GRADIENT_ACCUMULATION).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)


if __name__ == "__main__":
    main()
