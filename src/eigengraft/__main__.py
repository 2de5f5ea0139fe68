"""`python -m eigengraft` runs the command `eigengraft`. torchrun starts the command in this way."""

import os
import sys


def command_line() -> None:
    """Run the command line. If a library that it needs is missing, exit with the command that installs it."""
    # silence the log of torch's profiler, which `bench step` uses
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    try:
        from eigengraft.experiments.cli.main import main
    except ModuleNotFoundError as error:
        if error.name is not None and error.name.startswith("eigengraft"):
            raise
        install = '`pip install ".[experiments]"` in the clone of eigengraft'
        sys.exit(f"eigengraft: the command line needs {error.name}, which is not installed; run {install}")
    main()


if __name__ == "__main__":
    command_line()
