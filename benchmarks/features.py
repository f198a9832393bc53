"""What documents, unions, caps, dropout and windows cost beside plain causal attention, on one device.

`python -m benchmarks.features`
"""

import json
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import ringjax
from benchmarks.environment import run_module
from benchmarks.timing import HEADS, WIDTH, save, time_in_turns
from ringjax import Segments, Window

LENGTH, LONG = 8192, 32768
DENSE = {"pattern": [Segments(LENGTH)]}
LONGNET = {"pattern": [Segments(2048), Segments(LENGTH)]}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], int | None]] = {
    # What is measured, what it is compared with, and the number of equal documents.
    "one document": (DENSE, DENSE, 1),
    "8 documents": (DENSE, DENSE, 8),
    "soft cap": ({**DENSE, "logits_soft_cap": 50.0}, DENSE, None),
    "dropout": ({**DENSE, "dropout_rate": 0.1, "dropout_seed": 0}, DENSE, None),
    "window of 1024, T=32768": ({"pattern": [Window(1024)]}, {"pattern": [Segments(LONG)]}, None),
    "union of 2048 and 8192, both at rate 1": ({**LONGNET, "merge": "union"}, LONGNET, None),
}


def measure(case: str) -> None:
    """Times a case and what it is compared with in turns, and prints the ratios of their best times as JSON."""
    changed, plain, num_documents = CASES[case]
    length = LONG if str(LONG) in case else LENGTH
    arrays = [jnp.asarray(a, jnp.float32) for a in np.random.default_rng(0).normal(size=(3, 1, length, HEADS, WIDTH))]
    ids = None if num_documents is None else jnp.arange(LENGTH, dtype=jnp.int32)[None] * num_documents // LENGTH
    calls = {}
    for name, arguments, document_ids in (("plain", plain, None), ("changed", changed, ids)):

        def attend(*arrays: jax.Array, arguments: Any = arguments, document_ids: Any = document_ids) -> Any:
            return ringjax.ring_dilated_attention(*arrays, is_causal=True, document_ids=document_ids, **arguments)

        forward = jax.jit(attend)
        gradient = jax.jit(jax.grad(lambda *arrays, attend=attend: attend(*arrays).sum(), (0, 1, 2)))
        calls[f"{name} forward"] = lambda forward=forward: forward(*arrays)
        calls[f"{name} gradient"] = lambda gradient=gradient: gradient(*arrays)
    best = {name: min(seconds) for name, seconds in time_in_turns(calls).items()}
    print(json.dumps({name: best[f"changed {name}"] / best[f"plain {name}"] for name in ("forward", "gradient")}))


def main() -> None:
    """Measures each case in a process of its own, and saves the ratios."""
    save("features", [{"case": case, **run_module("benchmarks.features", case)} for case in CASES])


if __name__ == "__main__":
    measure(sys.argv[1]) if len(sys.argv) > 1 else main()
