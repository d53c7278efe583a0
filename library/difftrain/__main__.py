"""`python -m difftrain` is the command `difftrain`, for launchers: `torchrun ... -m difftrain train ...`."""

import sys

from difftrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
