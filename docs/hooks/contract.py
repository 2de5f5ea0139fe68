"""The page of the contract: the docstring of `Stage` as Markdown, so that it can be read in a clone, too.

`python docs/hooks/contract.py` writes the page again after the docstring was changed.
"""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import eigengraft

PAGE = Path(__file__).parents[1] / "guide" / "contract.md"
INTRODUCTION = """\
# The contract of a stage

The contract is the docstring of the class [`Stage`](../../preconditioners/base.py#stage): everything that a stage must
do and must not do. It is the rest of this page.

[A new stage](new-stage.md) has examples. The page [Python](../reference/python.md#writing-a-stage) describes the fields
of `Traits`, `Inner`, `Request` and `Slot`.
"""


def page() -> str:
    """Return the text of the page.

    The list of hooks, a paragraph in aligned columns, is a block of code, and the subject with which a paragraph begins
    is bold. The lists that every family appends to its docstring are left out.
    """
    contract, paragraphs = (inspect.getdoc(eigengraft.Stage) or "").partition("\n\nA member defines:")[0], []
    for paragraph in contract.split("\n\n"):
        aligned = all("   " in line for line in paragraph.splitlines())
        subject = re.sub(r"\A([A-Z][a-z]+(?: [a-z]+){0,2}\.) ", r"**\1** ", paragraph)
        paragraphs.append(f"```text\n{paragraph}\n```" if aligned else subject)
    return "\n\n".join([INTRODUCTION.rstrip(), *paragraphs]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
