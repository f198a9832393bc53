"""Models of other libraries with ring attention on eight simulated devices, beside their own attention on one.

`python -m benchmarks.clients`; it makes an environment for each library, with Python 3.12. The adapters stand in
`tests/clients`.
"""

import tempfile
from typing import Any

import numpy as np

from benchmarks.environment import run_client
from benchmarks.timing import save

CLIENTS = {"tunix": {"Qwen 3": ()}, "maxtext": {"Llama 2": ("llama2-7b",), "Gemma 3": ("gemma3-4b",)}}
MOST = {"logits": 1e-5, "logits of packed documents": 1e-5, "gradients": 5e-5, "sampled tokens": 0.0}


def compare(client: str, model: str, *arguments: str) -> list[dict[str, Any]]:
    """Returns the largest differences of a model over a ring from the same with its own attention.

    Raises:
      ValueError: if one is too large.
    """
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: f"{folder}/{kind}.npz" for kind in ("own", "ring")}
        version, _ = (run_client(client, kind, file, *arguments) for kind, file in files.items())
        own, ring = (dict(np.load(file)) for file in files.values())
    rows = []
    for name, array in own.items():
        difference = abs(ring[name] - array).max() / abs(array).max()
        rows.append({"client": f"{version}, {model}", "relative difference of": name, "value": float(difference)})
        if difference > MOST[name]:
            raise ValueError(f"{rows[-1]}: it must be {MOST[name]} at most")
    return rows


def main() -> None:
    """Runs all, and writes the table."""
    pairs = [(client, model, *options) for client, models in CLIENTS.items() for model, options in models.items()]
    save("clients", [row for pair in pairs for row in compare(*pair)])


if __name__ == "__main__":
    main()
