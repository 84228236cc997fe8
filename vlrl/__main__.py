"""`python -m vlrl` is the `vlrl` command; `torchrun ... -m vlrl train CONFIG` runs it on several processes."""

import sys

from vlrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
