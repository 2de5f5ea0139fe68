"""Operators of torchvision, which timm and transformers import, that this build of torch has no code for."""

import importlib
import re
import sys

import torch


def import_timm() -> None:
    """Imports timm; operators that torchvision has no code for on a CPU are declared, and never called."""
    library = torch.library.Library("torchvision", "FRAGMENT")
    for _ in range(8):
        try:
            importlib.import_module("timm")
        except ImportError:
            return
        except RuntimeError as error:
            missing = re.search(r"torchvision::(\w+)", str(error))
            if missing is None:
                raise
            library.define(f"{missing[1]}() -> ()")
            for name in [name for name in sys.modules if name.split(".")[0] in ("timm", "torchvision")]:
                del sys.modules[name]
        else:
            KEPT.append(library)
            return


KEPT: list[torch.library.Library] = []
import_timm()
