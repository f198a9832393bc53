"""Makes the data of the tests that are outputs of others' code.

`python -m benchmarks.peer_outputs`, or with the folder of a checkout of github.com/prov-gigapath/prov-gigapath for the
states of its slide encoder.
"""

import sys

from benchmarks.environment import ROOT, run_peer

DATA = ROOT / "tests" / "data"


def main() -> None:
    """Runs the peer, which writes its file."""
    if sys.argv[1:]:
        print(run_peer("gigapath_states.py", sys.argv[1], str(DATA / "gigapath_states.npz")))
    else:
        print(run_peer("transformers_layers.py", str(DATA / "transformers_layers.npz")))


if __name__ == "__main__":
    main()
