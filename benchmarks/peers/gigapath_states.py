"""What Prov-GigaPath's slide encoder computes, with weights from a formula, in float64.

`python -m benchmarks.peer_outputs gigapath FOLDER` runs it on a checkout of github.com/prov-gigapath/prov-gigapath, in
an environment that has torch, and keeps what it writes as data for the tests. Libraries that the encoder imports and
this does not need are replaced by empty ones, and flash-attn by dense attention that returns its log-sum-exp.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from gigapath_formula import CASES, inputs, parameters
from stand_ins import attend, stand_in_for_libraries


def load(folder: str) -> tuple[Any, Any]:
    """Imports the encoder and its configurations from a checkout."""
    np.set_printoptions(legacy="1.25")  # the encoder reads what NumPy prints of numbers
    stand_in_for_libraries()
    sys.path[:0] = [folder, f"{folder}/gigapath"]
    from gigapath import slide_encoder  # noqa: PLC0415  # of the checkout
    from torchscale.component import multihead_attention  # noqa: PLC0415
    from torchscale.model import LongNetConfig  # noqa: PLC0415

    multihead_attention.flash_attn_func = attend
    return slide_encoder, LongNetConfig


def make_model(slide_encoder: Any, configurations: Any, sizes: dict[str, Any]) -> Any:
    """Returns the encoder with the formula's weights."""
    depth, width = sizes["depth"], sizes["width"]
    configurations.__dict__[f"LongNet_{depth}_layers_{width}_dim"] = {
        "encoder_layers": depth,
        "encoder_embed_dim": width,
        "encoder_ffn_embed_dim": 4 * width,
        "encoder_attention_heads": 16,
        "flash_attention": True,
    }
    norm = lambda size: torch.nn.LayerNorm(size, eps=1e-6)
    model = slide_encoder.LongNetViT(sizes["in_chans"], width, depth, norm_layer=norm, global_pool=sizes["global_pool"])
    model = model.double().eval()
    arrays = parameters(depth, width, sizes["in_chans"])
    model.load_state_dict({name: torch.from_numpy(array) for name, array in arrays.items()})
    if sizes["segment_lengths"]:
        model.encoder.args.segment_length = sizes["segment_lengths"]
    return model


def run(folder: str, cases: dict[str, dict[str, Any]]) -> dict[str, np.ndarray]:
    """Returns the states [layers + 1, T + 1, D] and the pooled output [D] of each case."""
    modules = load(folder)
    found: dict[str, np.ndarray] = {}
    for name, sizes in cases.items():
        model = make_model(*modules, sizes)
        embeddings, coordinates = map(torch.from_numpy, inputs(sizes["length"], sizes["in_chans"]))
        states: list[torch.Tensor] = []
        original = model.encoder.forward

        def recorded(*arguments: Any, original: Any = original, states: Any = states, **options: Any) -> Any:
            result = original(*arguments, **{**options, "return_all_hiddens": True})
            states.extend(result["encoder_states"])
            return result

        model.encoder.forward = recorded
        with torch.no_grad():
            (pooled,) = model(embeddings, coordinates)
        found[f"{name}/states"] = np.stack([state[0, :: sizes["every"]].numpy() for state in states])
        found[f"{name}/pooled"] = pooled[0].numpy()
    return found


def main() -> None:
    """Writes the states of all cases."""
    folder, path = sys.argv[1:]
    found = run(folder, CASES)
    np.savez_compressed(path, **{name: array.astype(np.float32) for name, array in found.items()})
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
