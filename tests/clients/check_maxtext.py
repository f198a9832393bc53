"""Writes what a model of MaxText computes: `check_maxtext.py ring FILE NAME` on eight devices, `own` on one."""

import json
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from maxtext.configs import pyconfig
from maxtext.layers.attention_op import AttentionOp
from maxtext.utils.model_creation_utils import from_config
from maxtext_ring import ring_attention

LENGTH = 64
SIZES = {
    "base_emb_dim": 64,
    "base_num_query_heads": 4,
    "base_num_kv_heads": 2,
    "head_dim": 16,
    "base_mlp_dim": 96,
    "vocab_size": 128,
    "max_target_length": LENGTH,
    "dtype": "float32",
    "weight_dtype": "float32",
    "scan_layers": False,
    "attention": "dot_product",
    "matmul_precision": "highest",
    "enable_checkpointing": False,
    "enable_dropout": False,
    "skip_jax_distributed_system": True,
    "context_parallel_load_balance": False,
    "run_name": "check",
}
MODELS = {
    "llama2-7b": {"base_num_decoder_layers": 2},
    "gemma3-4b": {"base_num_decoder_layers": 6, "sliding_window_size": 9},
}
MESHES = {
    "own": {"ici_fsdp_parallelism": 1, "per_device_batch_size": 2},
    "ring": {"ici_fsdp_parallelism": 2, "ici_context_parallelism": 4, "per_device_batch_size": 0.25},
}
DOCUMENTS = np.repeat([[1, 2, 3]], [20, 13, 31], axis=1).repeat(2, axis=0)
POSITIONS = np.concatenate([np.arange(20), np.arange(13), np.arange(31)])[None].repeat(2, axis=0)


def run(name: str, kind: str) -> dict[str, np.ndarray]:
    """Returns the logits of packed documents, and gradients."""
    if kind == "ring":
        AttentionOp.apply_attention = ring_attention()
    options = {**SIZES, **MODELS[name], **MESHES[kind], "model_name": name, "override_model_config": True}
    config = pyconfig.initialize(["check", *(f"{key}={value}" for key, value in options.items())])
    tokens = np.random.default_rng(0).integers(1, 128, (2, LENGTH))
    model = from_config(config, jax.devices()[: 8 if kind == "ring" else 1], rngs=nnx.Rngs(params=0, dropout=1))

    @nnx.jit
    def logits_of(model: nnx.Module) -> jax.Array:
        return model(tokens, POSITIONS, DOCUMENTS, enable_dropout=False)

    logits = logits_of(model)
    logits = logits[0] if isinstance(logits, tuple) else logits
    gradient = nnx.jit(nnx.grad(lambda model: jnp.sin(logits_of(model)).mean()))(model)
    leaves = [np.ravel(leaf) for leaf in jax.device_get(jax.tree.leaves(gradient))]
    return {"logits of packed documents": np.asarray(logits), "gradients": np.concatenate(leaves)}


if __name__ == "__main__":
    kind, file, name = sys.argv[1:]
    jax.config.update("jax_num_cpu_devices", 8)
    np.savez(file, **run(name, kind))
    print(json.dumps(f"maxtext {version('maxtext')}"))
