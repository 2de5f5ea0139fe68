"""`python -m eigengraft` is the command `eigengraft`; torchrun starts it so."""

import os
import sys


def command_line() -> None:
    """Run the command line; where its libraries are missing, say what installs them."""
    # `bench step` asks torch's profiler, which prints lines of its own.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        from eigengraft.experiments.cli.main import main
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("eigengraft"):
            raise
        sys.exit(f"eigengraft: the command line needs '{error.name}'; pip install 'eigengraft[experiments]'")
    main()


if __name__ == "__main__":
    command_line()
