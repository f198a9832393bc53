"""The command `ringjax`, which is also `python -m ringjax`."""

import sys

from ringjax._tools.command import main

if __name__ == "__main__":
    sys.exit(main())
