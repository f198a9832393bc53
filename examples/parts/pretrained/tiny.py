"""A tiny random model with a tokenizer, for trying a program without a checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
from flax import nnx
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from parts.pretrained.checkpoint import save
from parts.pretrained.config import make_config
from parts.pretrained.model import LanguageModel
from parts.pretrained.text import read_text

END = "<|end|>"
SIZES = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "eos_token_id": 0,
}


def write_tiny(folder: Path, files: Sequence[Path], seed: int) -> None:
    """Writes a checkpoint with random parameters, and a tokenizer trained on some of the files."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=512, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(map(read_text, files[:32]), trainer)
    types = {"dtype": jnp.float32, "param_dtype": jnp.float32, "rngs": nnx.Rngs(seed)}
    save(LanguageModel(make_config(SIZES | {"vocab_size": tokenizer.get_vocab_size()}, folder), **types), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
