"""Makes the data of the tests that are outputs of others' code: `python -m benchmarks.peer_outputs`."""

from benchmarks.environment import ROOT, run_peer


def main() -> None:
    """Runs the peer, which writes its file."""
    print(run_peer("transformers_layers.py", str(ROOT / "tests" / "data" / "transformers_layers.npz")))


if __name__ == "__main__":
    main()
