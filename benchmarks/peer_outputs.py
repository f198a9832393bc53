"""Makes the data of the tests that are outputs of others' code.

`python -m benchmarks.peer_outputs layers`, `attention`, `models` or `rope`; or with the folder of a checkout: `gigapath
FOLDER` of github.com/prov-gigapath/prov-gigapath, `longnet FOLDER` of github.com/microsoft/torchscale.
"""

import sys

from benchmarks.environment import ROOT, run_peer

DATA = ROOT / "tests" / "data"
# The script of each peer, and the file that it writes.
PEERS = {
    "layers": ("transformers_layers.py", "transformers_layers.npz"),
    "attention": ("transformers_attention.py", "transformers_attention.npz"),
    "models": ("transformers_models.py", "transformers_models.npz"),
    "rope": ("transformers_rope.py", "transformers_rope.npz"),
    "gigapath": ("gigapath_states.py", "gigapath_states.npz"),
    "longnet": ("longnet_states.py", "longnet_states.npz"),
}


def main() -> None:
    """Runs the peer, which writes its file."""
    name, *folder = sys.argv[1:]
    script, file = PEERS[name]
    print(run_peer(script, *folder, str(DATA / file)))


if __name__ == "__main__":
    main()
