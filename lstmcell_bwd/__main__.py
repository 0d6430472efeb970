"""`python -m lstmcell_bwd` and the command `lstmcell-bwd`."""

from __future__ import annotations

import sys

EXTRA = ("click", "rich", "threadpoolctl")


def main() -> None:
    """Run the command line, or say how to install what it needs."""
    try:
        from lstmcell_bwd.cli import cli
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in EXTRA:
            raise
        sys.exit(usage_error(f"the command line needs the package {error.name}: pip install 'lstmcell_bwd[cli]'"))
    cli(prog_name="lstmcell-bwd")


def usage_error(message: str) -> int:
    """Say what is wrong on the standard error; return the exit code for it."""
    print(f"Error: {message}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    main()
