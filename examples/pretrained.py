"""Loads a pretrained language model from the Hugging Face hub's files onto a mesh, and continues tokens.

Llama 2 and 3, Mistral, Qwen 2 and 3, Gemma 2 and 3 (text):

    python examples/pretrained.py FOLDER --tokens 1,2,3 --count 32 --mesh fsdp=2,seq=4

`load` gives the model for programs of your own. `pattern` and `rope` replace those of the layers that attend to all
tokens, for longer contexts.
"""

import argparse
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from parts.distribution import make_mesh, parse_mesh
from parts.pretrained_config import ModelConfig, Rope, read_config
from parts.pretrained_model import LanguageModel
from safetensors import safe_open

Tensors = dict[str, Callable[[], jax.Array]]


def load(
    folder: str | Path,
    *,
    dtype: Any,
    param_dtype: Any = None,
    mesh: Mesh,
    pattern: Any = None,
    rope: Rope | None = None,
    spec: P | None = None,
) -> LanguageModel:
    """Returns the model of a checkpoint, each tensor laid on the mesh as it is read.

    Args:
      folder: holds `config.json` and safetensors, in one file or in shards.
      dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters, `dtype` by default.
      mesh: the mesh; of its axes "fsdp" and "tensor" cut parameters, where they divide them.
      pattern: the branches of layers that attend to all tokens, merged as a union; all tokens by default.
      rope: their frequencies and factor, as :func:`ringjax.rope_frequencies` returns them; the checkpoint's by default.
      spec: how heads [B, T, N, H] lie on the mesh, such as ``P("fsdp", "seq", "tensor")``: fused kernels need it.

    Raises:
      ValueError: for an unknown architecture, and for a tensor that is missing, unknown or misshapen, naming it.
    """
    config = read_config(folder)
    param_dtype = dtype if param_dtype is None else param_dtype
    types = {"dtype": dtype, "param_dtype": param_dtype}
    make = lambda: LanguageModel(config, pattern=pattern, rope=rope, spec=spec, **types, rngs=nnx.Rngs(0))
    definition, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    specs = dict(nnx.to_flat_state(nnx.get_partition_spec(params)))
    tensors, loaded = _tensors(Path(folder)), {}
    for path, param in nnx.to_flat_state(params):
        name, change = _tensor_of(config, path, param.shape)
        if name not in tensors:
            raise ValueError(f"{folder} has no tensor {name!r}: the checkpoint is not complete")
        array = change(tensors.pop(name)())
        if array.shape != param.shape:
            raise ValueError(f"{folder}: {name!r} makes {array.shape}, and the configuration {param.shape}")
        value = specs[path].get_value() if hasattr(specs[path], "get_value") else specs[path]
        sharding = NamedSharding(mesh, _spec(mesh, value, param.shape))
        loaded[path] = param.replace(jax.device_put(array.astype(param.dtype), sharding))
    if config.is_tied:
        tensors.pop("lm_head.weight", None)
    if tensors:
        raise ValueError(f"{folder} has a tensor {next(iter(tensors))!r} that no parameter takes")
    return nnx.merge(definition, nnx.from_flat_state(loaded), rest)


def _tensors(folder: Path) -> Tensors:
    """Returns what reads each tensor of a folder."""
    index = folder / "model.safetensors.index.json"
    files = sorted({*json.loads(index.read_text())["weight_map"].values()}) if index.exists() else ["model.safetensors"]
    found: Tensors = {}
    for file in files:
        opened = safe_open(folder / file, framework="flax")
        found |= {name: lambda name=name, opened=opened: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return {name.replace("language_model.model.", "model."): read for name, read in found.items()}


# The parameters of a block, and what a checkpoint calls them.
NAMES = {
    ("input_norm",): "input_layernorm",
    ("attention", "query"): "self_attn.q_proj",
    ("attention", "key"): "self_attn.k_proj",
    ("attention", "value"): "self_attn.v_proj",
    ("attention", "out"): "self_attn.o_proj",
    ("attention", "query_ln"): "self_attn.q_norm",
    ("attention", "key_ln"): "self_attn.k_norm",
    ("feed_forward", "gate"): "mlp.gate_proj",
    ("feed_forward", "up"): "mlp.up_proj",
    ("feed_forward", "down"): "mlp.down_proj",
}
# A norm before the feed-forward layer, which Gemma names otherwise, as it has one behind attention too.
NORMS = {("hidden_norm",): "post_attention_layernorm"}
GEMMA_NORMS = {
    ("attended_norm",): "post_attention_layernorm",
    ("hidden_norm",): "pre_feedforward_layernorm",
    ("output_norm",): "post_feedforward_layernorm",
}


def _tensor_of(config: ModelConfig, path: Any, shape: tuple[int, ...]) -> tuple[str, Callable[[jax.Array], jax.Array]]:
    """Returns the name of the tensor of a parameter, and what makes the parameter of it."""
    *place, kind = path
    is_norm = kind == "scale"
    if place[0] == "blocks":
        names = NAMES | (GEMMA_NORMS if config.is_gemma else NORMS)
        name = f"model.layers.{place[1]}.{names[tuple(place[2:])]}"
    else:
        name = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}[place[0]]
    if is_norm:
        return f"{name}.weight", (lambda array: array + 1) if config.is_gemma else (lambda array: array)
    if kind == "bias":
        return f"{name}.bias", lambda array: array.reshape(shape)
    if kind == "embedding":
        return f"{name}.weight", lambda array: array
    return f"{name}.weight", lambda array: array.T.reshape(shape) if array.size == np.prod(shape) else array.T


def _spec(mesh: Mesh, spec: P | None, shape: tuple[int, ...]) -> P:
    """Returns a spec without the axes that the mesh lacks, or that do not divide their dimension."""
    cuts = lambda name, size: name in mesh.axis_names and size % mesh.shape[name] == 0
    given = [*(spec or ()), *[None] * len(shape)]
    return P(*(name if cuts(name, size) else None for name, size in zip(given, shape, strict=False)))


def generate(model: LanguageModel, prompts: list[list[int]], count: int) -> Iterator[np.ndarray]:
    """Yields the likeliest next token of each prompt, [B], so many times; one program serves all lengths."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    size = 1 << (int(lengths.max()) - 1).bit_length()
    tokens = np.stack([np.pad(prompt, (0, size - len(prompt))) for prompt in prompts]).astype(np.int32)
    model.init_cache(len(prompts), size + count)
    step = nnx.jit(lambda model, tokens, **options: model(tokens, decode=True, **options), static_argnames="prefill")
    logits = step(model, tokens, prefill=True, lengths=lengths)
    last = jnp.take_along_axis(logits, (lengths - 1)[:, None, None], axis=1)  # [B, 1, vocabulary]
    for number in range(count):
        chosen = last.argmax(axis=-1).astype(jnp.int32)  # [B, 1]
        yield np.asarray(chosen[:, 0])
        if number + 1 < count:
            last = step(model, chosen)


def main() -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(description="Continues tokens with a pretrained model.")
    parser.add_argument("folder", help="holds config.json and safetensors")
    parser.add_argument("--tokens", required=True, help="the prompt's tokens, such as 1,2,3")
    parser.add_argument("--count", type=int, default=16, help="how many tokens to add")
    parser.add_argument("--mesh", type=parse_mesh, help="such as fsdp=2,seq=4; one device by default")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    options = parser.parse_args()
    try:
        prompt = [int(token) for token in options.tokens.split(",")]
        mesh = make_mesh(options.mesh)
        model = load(options.folder, dtype=jnp.dtype(options.dtype), mesh=mesh)
    except (ValueError, OSError) as error:
        print(f"pretrained.py: {error}", file=sys.stderr)
        return 2
    with jax.set_mesh(mesh):
        print(",".join(str(int(token[0])) for token in generate(model, [prompt], options.count)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
