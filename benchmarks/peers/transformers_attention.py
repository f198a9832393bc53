"""The first attention layer of tiny Qwen 2 and 3, Gemma 2 and 3, and gpt-oss models: weights, inputs and outputs.

`python -m benchmarks.peer_outputs attention` runs it in an environment that has torch and transformers, and keeps what
it writes as data for the tests. The whole of each model runs, so that its own masks and its rotary embedding are used.
"""

import json
import sys

import numpy as np
import torch
import transformers
from transformers.models.gemma2.modeling_gemma2 import Gemma2Model
from transformers.models.gemma3.modeling_gemma3 import Gemma3TextModel
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssModel
from transformers.models.qwen2.modeling_qwen2 import Qwen2Model
from transformers.models.qwen3.modeling_qwen3 import Qwen3Model

LENGTH = 23
SHARED = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "vocab_size": 64,
    "sliding_window": 7,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "attn_implementation": "eager",
    "initializer_range": 0.4,
}
ROPE = {"rope_type": "default", "rope_theta": 100.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1000.0,
    "factor": 4.0,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 32,
}
MODELS = {
    "qwen2": (Qwen2Model, transformers.Qwen2Config, {"rope_parameters": ROPE, "head_dim": 4}),
    "qwen3": (Qwen3Model, transformers.Qwen3Config, {"rope_parameters": ROPE}),
    "gemma2": (
        Gemma2Model,
        transformers.Gemma2Config,
        {"rope_parameters": ROPE, "query_pre_attn_scalar": 5, "attn_logit_softcapping": 2.0},
    ),
    "gemma3": (
        Gemma3TextModel,
        transformers.Gemma3TextConfig,
        {
            "rope_parameters": {"sliding_attention": ROPE, "full_attention": {**ROPE, "rope_theta": 1e4}},
            "query_pre_attn_scalar": 5,
        },
    ),
    "gpt-oss": (
        GptOssModel,
        transformers.GptOssConfig,
        {"rope_parameters": YARN, "num_local_experts": 2, "num_experts_per_tok": 1, "max_position_embeddings": 128},
    ),
}


def record(name: str) -> dict[str, np.ndarray]:
    """Returns the parameters of a model's first attention layer, its inputs [T, D] and its outputs [T, D]."""
    make, make_config, own = MODELS[name]
    torch.manual_seed(0)
    config = make_config(**{**SHARED, **own})
    model = make(config).eval()
    layer = model.layers[0].self_attn
    with torch.no_grad():  # norms, biases and sinks begin alike: make them differ
        for parameter in layer.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.3)
    found = {f"{name}/{key}": array.detach().numpy() for key, array in layer.state_dict().items()}

    def keep(module, args, kwargs, results):
        found[f"{name}/inputs"] = (args[0] if args else kwargs["hidden_states"])[0].numpy()
        found[f"{name}/outputs"] = results[0][0].numpy()

    layer.register_forward_hook(keep, with_kwargs=True)
    with torch.no_grad():
        model(torch.randint(3, 64, (1, LENGTH)), use_cache=False)
    kinds = getattr(config, "layer_types", None) or ["full_attention"]
    rope = config.rope_parameters
    said = {
        "window": config.sliding_window if kinds[0] == "sliding_attention" else None,
        "head_dim": layer.head_dim,
        "scale": float(layer.scaling),
        "soft_cap": getattr(config, "attn_logit_softcapping", None),
        "rope": rope.get(kinds[0], rope),
        "max_position_embeddings": config.max_position_embeddings,
    }
    return {**found, f"{name}/config": np.array(json.dumps(said))}


if __name__ == "__main__":
    arrays = {key: array for name in MODELS for key, array in record(name).items()}
    np.savez_compressed(sys.argv[1], **arrays)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
