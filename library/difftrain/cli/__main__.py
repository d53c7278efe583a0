"""`python -m difftrain.cli` is the command `difftrain`."""

import sys

from difftrain.cli import main

if __name__ == "__main__":
    sys.exit(main())
