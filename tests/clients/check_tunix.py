"""Writes what Tunix' Qwen 3 computes: `check_tunix.py ring FILE` on eight simulated devices, `own` on one.

Each is a process of its own, as the sampler keeps programs of a mesh.
"""

import json
import sys
from importlib.metadata import version

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tunix.generate.sampler import CacheConfig, Sampler
from tunix.models.qwen3 import model as qwen3
from tunix_ring import ring_block

SIZES = {"num_layers": 2, "vocab_size": 97, "embed_dim": 64, "hidden_dim": 96, "num_heads": 4, "head_dim": 16}
MORE = {"num_kv_heads": 2, "rope_theta": 1_000_000, "norm_eps": 1e-6, "use_tied_embedding": True}
AXES = ("fsdp", "sp", "tp")
LENGTH, STEPS = 64, 40
DOCUMENTS = np.repeat([[0, 1, 2]], [20, 13, 31], axis=1).repeat(2, axis=0)
PROMPTS = ["a ring of", "eight", "devices takes every key"]


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) - 30 for letter in text]

    def decode(self, tokens: list[int]) -> str:
        return "".join(chr(int(token) + 30) for token in tokens)

    def bos_id(self) -> int:
        return 1

    def eos_id(self) -> int:
        return 96

    def pad_id(self) -> int:
        return 0


def run(has_ring: bool) -> dict[str, np.ndarray]:
    """Returns logits, those of packed documents, gradients, and sampled tokens."""
    sizes = (2, 4, 1) if has_ring else (1, 1, 1)
    mesh = jax.make_mesh(sizes, AXES, (jax.sharding.AxisType.Auto,) * 3, devices=jax.devices()[: np.prod(sizes)])
    if has_ring:
        qwen3.Attention.block = ring_block()
    shardings = qwen3.ShardingConfig.get_default_sharding(enable_sp=True)
    tokens = np.random.default_rng(0).integers(1, 96, (2, LENGTH))
    positions = np.tile(np.arange(LENGTH), (2, 1))
    causal = np.tril(np.ones((LENGTH, LENGTH), bool))[None]
    of_documents = causal & (DOCUMENTS[:, :, None] == DOCUMENTS[:, None])
    mask = lambda mask: None if has_ring else np.broadcast_to(mask, (2, LENGTH, LENGTH))
    with jax.set_mesh(mesh):
        model = qwen3.Qwen3(qwen3.ModelConfig(**SIZES, **MORE, shd_config=shardings), rngs=nnx.Rngs(0))
        logits_of = nnx.jit(
            lambda model, mask, ids=None: model(tokens, positions, None, mask, segment_ids=ids if has_ring else None)[0]
        )
        gradient = nnx.jit(nnx.grad(lambda model, mask: jnp.sin(logits_of(model, mask)).mean()))
        found = {"logits": logits_of(model, mask(causal))}
        found["logits of packed documents"] = logits_of(model, mask(of_documents), DOCUMENTS)
        leaves = jax.tree.leaves(gradient(model, mask(causal)))
        found["gradients"] = np.concatenate([np.ravel(leaf) for leaf in leaves])
        out = Sampler(model, Letters(), CacheConfig(128, 2, 2, 16))(PROMPTS, STEPS, pad_output=True)
        found["sampled tokens"] = np.stack([np.asarray(row) for row in out.tokens])
    return jax.device_get(found)


if __name__ == "__main__":
    kind, file = sys.argv[1:3]
    jax.config.update("jax_num_cpu_devices", 8)
    np.savez(file, **run(kind == "ring"))
    print(json.dumps(f"google-tunix {version('google-tunix')}"))
