"""`python -m eigengraft` is the command `eigengraft`; torchrun starts it so."""

from eigengraft.experiments.cli.main import main

if __name__ == "__main__":
    main()
