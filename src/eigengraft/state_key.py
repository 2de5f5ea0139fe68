"""The keys under which a parameter's state is shown to torch and saved."""

from __future__ import annotations

from typing import NamedTuple, Self

FORMAT = "format"
"""Part of a coded slot that says how the other parts are coded."""
AVERAGING = "averaging"
"""Stage of the iterates, which belong to a parameter."""
PARTNER_STAGE = "partner"
"""Stage of what a parameter keeps for its partner, the other factor of a product."""


class StateKey(NamedTuple):
    """Address of one state tensor of a parameter, as text "<block>/<stage path>/<slot>/<part>".

    block: number of the block in the parameter; None: the tensor belongs to the parameter, and the text has no block.
    stage: dotted path of a stage or constraint, or "averaging"; "" for `step`, the count of gradients seen.
    slot: name of the slot.
    part: name of one of the tensors that a coded slot is stored in; "" for a slot that is stored as it is.

    >>> StateKey.parse("0/update.shampoo/root.1/codes")
    StateKey(block=0, stage='update.shampoo', slot='root.1', part='codes')
    >>> str(StateKey(None, "averaging", "mean"))
    'averaging/mean'
    """

    block: int | None
    stage: str
    slot: str
    part: str = ""

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key that a text stands for; `str` is its inverse."""
        first, slash, rest = text.partition("/")
        block, path = (int(first), rest) if slash and first.isdecimal() else (None, text)
        if "/" not in path:
            return cls(block, "", path)
        stage, slot, *part = path.split("/", 2)
        return cls(block, stage, slot, *part)

    def __str__(self) -> str:
        block = None if self.block is None else str(self.block)
        return "/".join(text for text in (block, self.stage, self.slot, self.part) if text)

    @staticmethod
    def join(first: str | int, rest: str) -> str:
        """The text of a key from the texts of its two halves; cheap enough for every step.

        >>> StateKey.join("update.momentum", "m"), StateKey.join(0, "update.momentum/m")
        ('update.momentum/m', '0/update.momentum/m')
        """
        return f"{first}/{rest}"

    @staticmethod
    def within_block(text: str) -> str:
        """Return the second half of a key that was joined from a block and the rest.

        >>> StateKey.within_block("0/update.momentum/m")
        'update.momentum/m'
        """
        return text.partition("/")[2]

    @property
    def name(self) -> str:
        """The key without its block and part: "<stage path>/<slot>", which is one name for all parameters."""
        return str(self._replace(block=None, part=""))
