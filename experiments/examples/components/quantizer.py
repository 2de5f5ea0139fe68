"""A quantizer of your own: 8-bit codes with one scale for each row of a slot.

In an experiment:

    imports: [quantizer.py]
    recipe: {base: soap, storage: {first_moment: {kind: rows8}}}
"""

from typing import Literal

import torch
from torch import Tensor

from eigengraft import Slot
from eigengraft.quantization import Quantizer
from eigengraft.slots import Encoded, Uniform


class Rows8(Quantizer):
    """codes = round(127 x / s),  s the largest absolute value in a row (the last axis)"""

    kind: Literal["rows8"] = "rows8"

    def unsupported(self, slot: Slot) -> str | None:
        return None if slot.shape else f"a slot with axes is required, got shape {slot.shape}"

    def encode(self, x: Tensor, before: Encoded | None = None, uniform: Uniform | None = None) -> Encoded:
        scales = x.abs().amax(-1, keepdim=True)  # [N, ..., 1], nan for a row with nan
        steps = torch.where(scales > 0, 127 * x / scales, 0.0)
        whole = steps.round() if uniform is None else (steps + uniform(steps, "rows8")).floor()
        return {"codes": whole.clamp(-127, 127).to(torch.int8), "scales": scales.float()}

    def decode(self, encoded: Encoded, slot: Slot, dtype: torch.dtype) -> Tensor:
        return encoded["codes"].to(dtype) * (encoded["scales"].to(dtype) / 127)


if __name__ == "__main__":
    from eigengraft.testing import check_quantizer

    print(check_quantizer(Rows8()))
