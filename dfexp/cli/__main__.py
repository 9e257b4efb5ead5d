"""`python -m dfexp.cli`."""

import sys

from dfexp.cli import main

if __name__ == "__main__":
    sys.exit(main())
