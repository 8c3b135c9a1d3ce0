"""`python -m headway_bench NAME [arguments]`; without a name, the list of benches."""

from __future__ import annotations

import sys

from headway.errors import HeadwayError
from headway_bench.registry import listing, run


def main(arguments: list[str]) -> int:
    """Run the named bench; 2 with a message for what the caller can mend."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(listing())
        return 0
    try:
        return run(arguments[0], arguments[1:])
    except HeadwayError as error:
        print(error, file=sys.stderr)
        return 2


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
