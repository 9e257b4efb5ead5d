"""`python -m dfexp.generate`: the generating process, started by `dfexp.generate.start`."""

import sys

from dfexp.generate.process import main

if __name__ == "__main__":
    sys.exit(main())
