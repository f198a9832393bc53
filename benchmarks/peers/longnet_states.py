"""What torchscale's LongNet computes in seven configurations each of encoder and decoder, with a formula's weights.

`python -m benchmarks.peer_outputs longnet FOLDER` runs it on a checkout of github.com/microsoft/torchscale, in an
environment that has torch, and keeps what it writes as data for the tests: in float64, as far as the original is.
"""

import json
import sys
from typing import Any

import numpy as np
import torch
from longnet_formula import (
    CASES,
    DILATION_RATES,
    EVERY,
    FFN_WIDTH,
    HEADS,
    LAYERS,
    SEGMENT_LENGTHS,
    VOCABULARY,
    WIDTH,
    parameters,
    tokens,
)
from stand_ins import attend, stand_in_for_libraries


def make(kind: str, case: dict[str, Any]) -> Any:
    """Returns an encoder or a decoder with the formula's weights."""
    from torchscale.architecture import config  # noqa: PLC0415  # of the checkout
    from torchscale.component.embedding import PositionalEmbedding  # noqa: PLC0415
    from torchscale.model.LongNet import LongNetDecoder, LongNetEncoder  # noqa: PLC0415

    options = {"segment_length": SEGMENT_LENGTHS, "dilated_ratio": DILATION_RATES, **case}
    lists = {name: str(options.pop(name)) for name in ("segment_length", "dilated_ratio")}
    own = {"embed_dim": WIDTH, "attention_heads": HEADS, "ffn_embed_dim": FFN_WIDTH, "layers": LAYERS}
    own |= {name: options.pop(name) for name in ("normalize_before",) if name in options}
    is_tied, positions = options.pop("share_input_output_embed", False), options.pop("learned_positions", None)
    shared = {**lists, **options, "flash_attention": True, "vocab_size": VOCABULARY}
    shared[f"share_{kind}_input_output_embed"] = is_tied
    make_config, make_model = {
        "encoder": (config.EncoderConfig, LongNetEncoder),
        "decoder": (config.DecoderConfig, LongNetDecoder),
    }[kind]
    arguments = make_config(**{f"{kind}_{name}": value for name, value in own.items()}, **shared)
    arguments.encoder_embedding_type = "language"  # its tied encoder asks for it
    model = make_model(
        arguments,
        embed_tokens=torch.nn.Embedding(VOCABULARY, WIDTH),
        embed_positions=PositionalEmbedding(positions, WIDTH) if positions else None,
    )
    model = model.double().eval()
    model.load_state_dict({name: torch.from_numpy(array) for name, array in parameters(kind, case).items()})
    return model


def run(kind: str, case: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Returns the states [layers + 1, B, T, D] and the output [B, T, V]."""
    model = make(kind, case)
    with torch.no_grad():
        result = model(torch.from_numpy(tokens()), return_all_hiddens=True)
    states, output = (
        (result["encoder_states"], result["encoder_out"])
        if kind == "encoder"
        else (result[1]["inner_states"], result[0])
    )
    return np.stack([state.numpy() for state in states]), output.numpy()


def main() -> None:
    """Writes the states of all cases."""
    folder, path = sys.argv[1:]
    stand_in_for_libraries()
    sys.path.insert(0, folder)
    from torchscale.component import multihead_attention  # noqa: PLC0415

    multihead_attention.flash_attn_func = attend
    found = {}
    for kind in ("encoder", "decoder"):
        for name, case in CASES.items():
            states, output = run(kind, case)
            found |= {f"{kind}/{name}/states": states[:, :, ::EVERY], f"{kind}/{name}/output": output[:, ::EVERY]}
    np.savez_compressed(path, **{name: array.astype(np.float32) for name, array in found.items()})
    print(json.dumps(sorted(found)))


if __name__ == "__main__":
    main()
