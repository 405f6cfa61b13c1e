"""`python -m octavo`: the command line (see `octavo.core.cli`)."""

import sys

if __name__ not in ("__main__", "octavo.__main__"):
    raise ImportError(f"this is `octavo.__main__`, not {__name__!r}")

from octavo.core.cli import main

if __name__ == "__main__":
    sys.exit(main())
