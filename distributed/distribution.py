"""The settings of a recipe for several ranks: how work is divided, and how gradients and updates are communicated."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from eigengraft.component import Component


class Distribution(Component):
    """The division of work over ranks: every block has one owner, which holds its state and computes its update.

    The trajectory is that of one process. Modes:

    auto: gradients and updates of DTensors are sent between the ranks of the DTensor's device mesh. Plain parameters
        count as replicated over all ranks of the default process group, if there is one with more than one rank.
    replicated: as auto, but DTensors are refused.
    sharded: as auto, but plain tensors are refused.
    local: every rank updates all of its parameters, independently of other ranks.
    """

    mode: Literal["auto", "replicated", "sharded", "local"] = Field(
        default="auto",
        description="parameters whose updates ranks divide: auto: DTensors and replicated parameters; replicated, "
        "sharded: one of the two, and the other is refused; local: none",
    )
    group_size: int | None = Field(
        default=None,
        ge=2,
        description="number of consecutive ranks that divide replicated parameters among them, such as those of one "
        "machine; every group computes all updates; default: all ranks are one group",
    )
    dtype: Literal["exact", "bf16"] = Field(
        default="exact",
        description="dtype that is sent: gradients and updates as they are computed, or rounded to bfloat16",
    )
    bucket: int = Field(
        default=1 << 28,
        ge=1,
        description="memory for messages, in bytes: a step needs at most twice this memory beside the state, and a "
        "rank receives a tenth of it in one round",
    )
    gather: Literal["updates", "parameters"] = Field(
        default="updates",
        description="tensors that owners of blocks of replicated parameters send to all ranks: updates, or the "
        "written parameters",
    )
    overlap_backward: bool = Field(
        default=False,
        description="true: gradients of sharded parameters are sent to owners during backward, as soon as they are "
        "complete; false: in the step",
    )
    timeout: float | None = Field(
        default=None,
        gt=0,
        description="longest time to wait for other ranks on a CPU, in seconds; default: the time-out of the process "
        "group",
    )
    work: dict[str, float] = Field(
        default={},
        description="measured time of a step of one block in milliseconds, by shape as '1024x256'; other shapes count "
        "by their number of operations",
    )

    @model_validator(mode="after")
    def _sends_what_it_says(self) -> Self:
        excluded = {
            "group_size": (self.group_size is not None, ("sharded", "local"), "nothing is replicated"),
            "gather": (self.gather == "parameters", ("sharded", "local"), "no rank has whole parameters to send"),
            "overlap_backward": (self.overlap_backward, ("replicated", "local"), "no gradient is sent"),
        }
        for field, (given, modes, why) in excluded.items():
            if given and self.mode in modes:
                got = getattr(self, field)
                raise ValueError(f"{field}: {got!r} cannot be combined with mode '{self.mode}', in which {why}")
        if self.gather == "parameters" and self.dtype != "exact":
            raise ValueError(
                f"gather: 'parameters' cannot be combined with dtype '{self.dtype}', which would round parameters; set "
                "dtype: exact, or gather: updates"
            )
        return self

    @property
    def message(self) -> int:
        """Size of the updates that a rank receives in one round of messages, in bytes.

        A step holds 3 to 18 times as many bytes: the sent and received gradients of one round, the sent and received
        updates of another round, and the blocks and intermediate results of the round that is computed. `psgd_kron` in
        float64 needs the most.
        """
        return max(1, self.bucket // 10)

    def measured(self, block: tuple[int, ...], counted: float) -> float:
        """Return the work of one step of a block: milliseconds if the field `work` has any times, else the number of
        operations.

        For a block whose shape has no measured time, the counted operations are converted to milliseconds, at 10^8
        operations per millisecond.

        block: shape of the block.
        counted: counted operations of a step of the block.
        """
        if not self.work:
            return counted
        return self.work.get("x".join(map(str, block)), counted / 1e8)
