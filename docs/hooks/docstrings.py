"""A griffe extension: docstrings on the page of the Python interface look like those of the reference pages."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
try:
    from markup import docstring
finally:
    sys.path.pop(0)


class AsWritten(griffe.Extension):  # type: ignore[misc, name-defined, unused-ignore]
    """Shows formulas as they stand, and begins a line for every argument."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = docstring(obj.docstring.value, formula_first=False)
