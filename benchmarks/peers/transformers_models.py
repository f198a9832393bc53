"""The logits of tiny checkpoints in transformers, and the tokens that it adds to prompts.

`python -m benchmarks.peer_outputs models` runs it in an environment that has torch and transformers, and keeps what it
writes as data for the tests, which draw the same checkpoints.
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

sys.path.append(str(Path(__file__).parents[2] / "tests"))

from tiny_checkpoints import CONFIGS, WRITTEN, write

LENGTH, COUNT, PROMPTS = 19, 32, (3, 8, 11, 17)


def load(folder: str) -> Any:
    """Returns the model of a checkpoint."""
    options = {"attn_implementation": "eager", "dtype": torch.float32}
    return transformers.AutoModelForCausalLM.from_pretrained(folder, **options).eval()


def record(name: str, folder: str) -> dict[str, np.ndarray]:
    """Returns tokens [2, T], their logits and loss, and what is added to prompts of several lengths [4, 32]."""
    write(folder, name)
    model = load(folder)
    tokens = torch.as_tensor(np.random.default_rng(0).integers(3, 64, (2, LENGTH)))
    with torch.no_grad():
        out = model(tokens, labels=tokens, use_cache=False)
        added = [
            model.generate(tokens[:1, :size], max_new_tokens=COUNT, do_sample=False, use_cache=False)[0, size:]
            for size in PROMPTS
        ]
    assert all(len(one) == COUNT for one in added)
    added = np.stack([one.numpy() for one in added]).astype(np.uint8)
    found = {
        "tokens": tokens.numpy().astype(np.int32),
        "logits": out.logits.numpy(),
        "loss": out.loss.numpy(),
        "added": added,
    }
    return {f"{name}/{key}": array for key, array in found.items()}


if __name__ == "__main__":
    arrays = {}
    for model_name in CONFIGS:
        with tempfile.TemporaryDirectory() as path:
            arrays |= record(model_name, path)
            if model_name in WRITTEN:
                write(path, model_name, **WRITTEN[model_name])
                shown = torch.as_tensor(arrays[f"{model_name}/tokens"]).long()
                arrays[f"{model_name}/extended"] = load(path)(shown).logits.detach().numpy()
    np.savez_compressed(sys.argv[1], **arrays)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
