"""`python -m trace_async` is `trace-async`."""

import sys

from trace_async.cli import main

if __name__ == "__main__":
    sys.exit(main())
