"""Models of other libraries with ring attention on eight simulated devices, beside their own attention on one.

`python -m benchmarks.clients`; it makes an environment for each library, with Python 3.12. The adapters stand in
`tests/clients`.
"""

from benchmarks.environment import run_client
from benchmarks.timing import save

CLIENTS = ("tunix", "maxtext")
MOST = {"logits": 1e-5, "gradients": 5e-5}


def main() -> None:
    """Runs all, and writes the table.

    Raises:
      ValueError: if a client's numbers are others.
    """
    rows = [row for client in CLIENTS for row in run_client(client)]
    for row in rows:
        most = MOST.get(row["figure"].split()[0].rstrip(","))
        if row["value"] < 1 if most is None else row["value"] > most:
            raise ValueError(f"{row['client']}: {row['figure']} {row['value']}")
    save("clients", rows)


if __name__ == "__main__":
    main()
