"""`python -m dfexp.generate`: the generating process, started by `dfexp.generate.start`."""

import gc
import sys

if __name__ == "__main__":
    gc.disable()  # imports make much that stays, and a tenth of their time would go into walking it again and again
    from dfexp.generate.process import main

    gc.enable()
    sys.exit(main())
