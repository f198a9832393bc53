"""Reads checkpoints of pretrained models onto a mesh, and writes them."""

import functools
import json
import shutil
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from parts.distribution import fitting
from parts.pretrained.config import read_config
from parts.pretrained.lora import merge
from parts.pretrained.model import LanguageModel
from parts.pretrained.weights import Tensor, Tensors, read_tensors, tensors_of, write_tensors

TOKENIZER = ("tokenizer*", "special_tokens_map.json", "vocab.json", "merges.txt", "generation_config.json", "*.jinja")


def load(
    folder: str | Path,
    *,
    dtype: Any,
    param_dtype: Any = None,
    mesh: Mesh,
    pattern: Any = None,
    rope: Mapping[str, Any] | None = None,
    spec: P | None = None,
    remat: bool = False,
) -> LanguageModel:
    """Returns the model of a checkpoint, each tensor laid on the mesh as it is read.

    Args:
      folder: holds `config.json` and safetensors, in one file or in shards.
      dtype: the dtype of the computation.
      param_dtype: the dtype of the parameters, `dtype` by default.
      mesh: parameters are sharded over its axes "fsdp" and "tensor" where these divide their dimensions.
      pattern: the branches of layers that attend to all tokens, merged as a union; all tokens by default.
      rope: the rotary embedding of these layers, as transformers has it: ``{"rope_type": "yarn", "factor": 4.0}``; what
        it does not say is the checkpoint's.
      spec: how heads [B, T, N, H] lie on the mesh, such as ``P("fsdp", "seq", "tensor")``: fused kernels need it.
      remat: whether gradients compute each block again instead of keeping what is inside.

    Raises:
      ValueError: for an unknown architecture, and for a tensor that is missing, unknown or misshapen, naming it.
    """
    config = read_config(folder, pattern=pattern, rope=rope)
    types = {"dtype": dtype, "param_dtype": dtype if param_dtype is None else param_dtype}
    make = lambda: LanguageModel(config, spec=spec, remat=remat, **types, rngs=nnx.Rngs(0))
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):  # another one may lack axes
        definition, params, rest = nnx.split(nnx.eval_shape(make), nnx.Param, ...)
    given, loaded = read_tensors(Path(folder)), {}
    for path, param in nnx.to_flat_state(params):
        arrays = (_take(given, tensor, folder) for tensor in tensors_of(config, path, param.shape))
        loaded[path] = param.replace(_lay(arrays, path, param, mesh))
    if config.is_tied:
        given.pop("lm_head.weight", None)
    if given:
        raise ValueError(f"{folder} has an unknown tensor {next(iter(given))!r}: check the layers in config.json")
    return nnx.merge(definition, nnx.from_flat_state(loaded), rest)


def _take(given: Tensors, tensor: Tensor, folder: Any) -> np.ndarray:
    """Takes a tensor from those of a folder, as its parameter."""
    if tensor.name not in given:
        raise ValueError(f"{folder} has no tensor {tensor.name!r}: the checkpoint is not complete")
    array = tensor.read(given.pop(tensor.name)())
    if array.shape != tensor.shape:
        raise ValueError(f"{folder}: {tensor.name!r} makes {array.shape}, but config.json asks for {tensor.shape}")
    return array


def _lay(arrays: Iterator[np.ndarray], path: Any, param: Any, mesh: Mesh) -> jax.Array:
    """Places a parameter on the mesh; a stacked one is read layer by layer, so that the host holds one."""
    spec = fitting(mesh, param.get_metadata().get("out_sharding"), param.shape)
    whole = NamedSharding(mesh, spec)
    if not _is_stacked(path):
        return jax.device_put(next(arrays).astype(param.dtype), whole)
    stack = jnp.zeros(param.shape, param.dtype, device=whole)
    of_layer = NamedSharding(mesh, P(*spec[1:]))
    for layer, array in enumerate(arrays):
        stack = _put(stack, jax.device_put(array.astype(param.dtype), of_layer), layer)
    return stack


@functools.partial(jax.jit, donate_argnums=0)
def _put(stack: jax.Array, array: jax.Array, layer: int) -> jax.Array:
    return stack.at[layer].set(array)


def _is_stacked(path: Any) -> bool:
    return path[0] == "stacked"


def save(model: LanguageModel, folder: str | Path) -> None:
    """Writes a checkpoint that transformers opens, with adapters merged and the tokenizer's files.

    Args:
      model: the model; the dtype of its parameters is that of the files.
      folder: a folder without a checkpoint.

    Raises:
      ValueError: if there is a checkpoint.

    Warns:
      UserWarning: for a pattern or a rotary embedding that transformers cannot express.
    """
    folder, source = Path(folder), model.config.source
    check_free(folder)
    for what in source.lost:
        warnings.warn(f"transformers cannot express {what}: {folder / 'config.json'} is without it", stacklevel=2)
    params = nnx.to_flat_state(nnx.state(merge(model), nnx.Param))
    tensors = {
        tensor.name: functools.partial(_write, tensor, param, layer if _is_stacked(path) else ...)
        for path, param in params
        for layer, tensor in enumerate(tensors_of(model.config, path, param.shape))
    }
    own = ("quantization_config", "dtype", "torch_dtype")
    settings = {name: value for name, value in source.settings.items() if name not in own}
    settings |= {"torch_dtype": jnp.dtype(params[0][1].dtype).name}
    folder.mkdir(parents=True, exist_ok=True)
    for file in {file for pattern in TOKENIZER for file in source.folder.glob(pattern) if file.is_file()}:
        shutil.copy(file, folder)
    write_tensors(folder, tensors)
    (folder / "config.json").write_text(json.dumps(settings, indent=2))  # last: with it the checkpoint is whole


def check_free(folder: Path) -> None:
    """Checks that a folder has no checkpoint.

    Raises:
      ValueError: if it has one.
    """
    if (folder / "config.json").exists() or any(folder.glob("*.safetensors")):
        raise ValueError(f"{folder} holds a checkpoint: name another folder")


def _write(tensor: Tensor, param: Any, layer: Any) -> np.ndarray:
    return tensor.write(np.asarray(param.get_value()[layer]))
