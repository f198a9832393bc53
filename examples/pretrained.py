"""Loads a pretrained language model from the Hugging Face hub's files onto a mesh, and continues tokens.

Llama 2 and 3, Mistral, Qwen 2 and 3, Gemma 2 and 3 (text), gpt-oss:

    python examples/pretrained.py FOLDER --tokens 1,2,3 --count 32 --mesh fsdp=2,seq=4

`load` gives the model for programs of your own, and `save` writes it for transformers to open. `pattern` and `rope`
replace those of the layers that attend to all tokens, for longer contexts.
"""

import argparse
import sys

import jax
import jax.numpy as jnp
from parts.distribution import make_mesh, parse_mesh
from parts.options import positive
from parts.pretrained.checkpoint import load, save
from parts.pretrained.generation import generate

__all__ = ["generate", "load", "save"]


def main() -> int:
    """Runs the command line; returns its exit code."""
    parser = argparse.ArgumentParser(description="Continues tokens with a pretrained model.")
    parser.add_argument("folder", help="holds config.json and safetensors")
    parser.add_argument("--tokens", required=True, help="the prompt's tokens, such as 1,2,3")
    parser.add_argument("--count", type=positive, default=16, help="how many tokens to add")
    parser.add_argument("--mesh", type=parse_mesh, help="such as fsdp=2,seq=4; by default all devices, seq=8")
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
