"""Guards against overflow, underflow, division by zero, bits that depend on a place, and skewed columns; bfloat16;
many tensors at once."""

from .bfloat16 import has_fast_bfloat16 as has_fast_bfloat16
from .bfloat16 import multiplied_in_float32 as multiplied_in_float32
from .fake_tensors import active_fake_mode as active_fake_mode
from .fake_tensors import cached_tensors as cached_tensors
from .fake_tensors import fake_mode as fake_mode
from .fake_tensors import has_values as has_values
from .guards import apply_aligned as apply_aligned
from .guards import block_norm as block_norm
from .guards import compute_dtype as compute_dtype
from .guards import copy_blocks as copy_blocks
from .guards import finite_blocks as finite_blocks
from .guards import identity_like as identity_like
from .guards import in_registers as in_registers
from .guards import known_to_hold as known_to_hold
from .guards import may_branch_on_values as may_branch_on_values
from .guards import per_block as per_block
from .guards import products as products
from .guards import safe_ratio as safe_ratio
from .guards import signs as signs
from .guards import symmetrized as symmetrized
from .guards import tiny as tiny
from .guards import to_power as to_power
from .guards import transposed as transposed
from .guards import where_blocks as where_blocks
from .multi_tensor import copies as copies
from .multi_tensor import differs_from_rounded as differs_from_rounded
from .multi_tensor import norms_by_dtype as norms_by_dtype
from .multi_tensor import scale_tensors_ as scale_tensors_
from .multi_tensor import squares_are_finite as squares_are_finite
from .multi_tensor import subtract_scaled_ as subtract_scaled_
from .rectification import rectified as rectified
from .rectification import safe_factor as safe_factor
