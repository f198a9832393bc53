"""What the attention layers of Mistral, Gemma 3 and gpt-oss compute in transformers, with random weights.

`python -m benchmarks.peer_outputs layers` runs it in an environment that has torch and transformers, and keeps what it
writes as data for the tests. The whole of a tiny model runs, so that its own masks are used.
"""

import json
import sys

import numpy as np
import torch
import transformers
from transformers.models.gemma3 import modeling_gemma3
from transformers.models.gpt_oss import modeling_gpt_oss
from transformers.models.mistral import modeling_mistral

LENGTH, WINDOW = 29, 7
SHARED = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "sliding_window": WINDOW,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
    "initializer_range": 0.4,
}
LAYERS = ["sliding_attention", "full_attention"]
MODELS = {
    "mistral": (modeling_mistral, modeling_mistral.MistralModel, transformers.MistralConfig(**SHARED)),
    "gemma3": (
        modeling_gemma3,
        modeling_gemma3.Gemma3TextModel,
        transformers.Gemma3TextConfig(**SHARED, layer_types=LAYERS, query_pre_attn_scalar=5),
    ),
    "gpt-oss": (
        modeling_gpt_oss,
        modeling_gpt_oss.GptOssModel,
        transformers.GptOssConfig(**SHARED, layer_types=LAYERS, num_local_experts=2, num_experts_per_tok=1),
    ),
}


def record(name: str) -> dict[str, np.ndarray]:
    """Returns queries, keys, values and outputs of each layer of a model, [T, heads, width], and what else it takes."""
    module, make, config = MODELS[name]
    torch.manual_seed(0)
    model = make(config).eval()
    found: dict[str, np.ndarray] = {}
    attend = module.eager_attention_forward

    def recorded(layer, query, key, value, mask, scaling, **options):
        out, weights = attend(layer, query, key, value, mask, scaling=scaling, **options)
        prefix = f"{name}/{layer.layer_idx}/"
        for kind, array in (("query", query), ("key", key), ("value", value)):
            found[prefix + kind] = array[0].transpose(0, 1).detach().numpy()
        found[prefix + "out"] = out[0].detach().numpy()
        found[prefix + "scale"] = np.float64(scaling)
        is_windowed = name == "mistral" or config.layer_types[layer.layer_idx] == "sliding_attention"
        found[prefix + "window"] = np.int64(WINDOW if is_windowed else 0)
        if name == "gpt-oss":
            found[prefix + "sinks"] = layer.sinks.detach().numpy()
        return out, weights

    module.eager_attention_forward = recorded
    with torch.no_grad():
        for layer in model.layers:
            if name == "gpt-oss":  # large enough to matter
                layer.self_attn.sinks.normal_(std=2.0)
        model(torch.randint(3, 64, (1, LENGTH)), use_cache=False)
    return found


if __name__ == "__main__":
    arrays = {key: array for name in MODELS for key, array in record(name).items()}
    np.savez_compressed(sys.argv[1], **arrays)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
