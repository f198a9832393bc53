"""The frequencies that transformers makes of the rotary embeddings of models, scaled and not.

`python -m benchmarks.peer_outputs rope` runs it in an environment that has torch and transformers, and keeps what it
writes as data for the tests: for each case the arguments, as JSON, the frequencies and the factor.
"""

import json
import sys

import numpy as np
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

SHORT, LONG = [1.0 + 0.05 * i for i in range(16)], [1.0 + 1.5 * i for i in range(16)]
# The parameters, the width of a head, the model's length and the length of a sequence.
CASES = {
    "linear": ({"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}, 256, 131_072, None),
    "dynamic": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 64, 2048, 8192),
    "dynamic, shorter": ({"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0}, 64, 2048, 1024),
    "llama3": (
        {
            "rope_type": "llama3",
            "rope_theta": 5e5,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        128,
        131_072,
        None,
    ),
    "yarn": (
        {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 32_768},
        128,
        131_072,
        None,
    ),
    "yarn, gpt-oss": (
        {
            "rope_type": "yarn",
            "rope_theta": 150_000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 4096,
        },
        64,
        131_072,
        None,
    ),
    "yarn, mscale": (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": None,
            "mscale": 1.0,
            "mscale_all_dim": 0.7,
            "original_max_position_embeddings": 4096,
        },
        64,
        163_840,
        None,
    ),
    "yarn, attention factor": (
        {
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 2.0,
            "attention_factor": 0.9,
            "original_max_position_embeddings": 4096,
        },
        64,
        8192,
        None,
    ),
    "longrope, long": (
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": SHORT,
            "long_factor": LONG,
            "original_max_position_embeddings": 4096,
        },
        32,
        131_072,
        131_072,
    ),
    "longrope, short, partial": (
        {
            "rope_type": "longrope",
            "rope_theta": 1e4,
            "short_factor": SHORT[:12],
            "long_factor": LONG[:12],
            "partial_rotary_factor": 0.75,
            "original_max_position_embeddings": 4096,
        },
        32,
        131_072,
        2048,
    ),
}


def record(parameters: dict, head_dim: int, most: int, length: int | None) -> tuple[np.ndarray, float]:
    """Returns the frequencies and the factor of a model with these parameters."""
    config = transformers.LlamaConfig(
        hidden_size=2 * head_dim,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=most,
        rope_parameters=parameters,
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu", seq_len=length)
    return frequencies.double().numpy(), factor


if __name__ == "__main__":
    arrays = {}
    for name, case in CASES.items():
        frequencies, factor = record(*case)
        arrays |= {f"{name}/arguments": json.dumps(case), f"{name}/frequencies": frequencies, f"{name}/factor": factor}
    np.savez_compressed(sys.argv[1], **arrays)
    print(json.dumps({"torch": torch.__version__, "transformers": transformers.__version__}))
