"""Measurements of one quantizer on one stack of factors."""

from __future__ import annotations

import math
import zlib
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from eigengraft import noise
from eigengraft.numerics import identity_like, symmetrized
from eigengraft.quantization import Quantizer
from eigengraft.slots import Encoded, Role, Slot

from ..common.declarations import label
from ..common.timing import angle, relative_error, worst
from ..problems.spectra import Spectrum, Synthetic, orthogonal


@dataclass(frozen=True)
class DecomposedStack:
    """A stack A = V Diag(l) V^T in float64.

    name: of its spectrum.
    a: A `[N, d, d]`.
    values: l `[N, d]`.
    vectors: V `[N, d, d]`.
    """

    name: str
    a: Tensor
    values: Tensor
    vectors: Tensor

    def condition(self) -> float:
        """Condition number; infinite where the rounding of float64 decides about the smallest eigenvalue."""
        low, high = self.values.amin(-1), self.values.amax(-1)
        rounding = self.a.shape[-1] * torch.finfo(torch.float64).eps * high
        return worst(torch.where(low > rounding, high / low, torch.inf))


def decompose(spectrum: Spectrum, count: int, d: int, seed: int) -> DecomposedStack | None:
    """The stack of a spectrum; eigenvectors of equal eigenvalues are those drawn, not those an algorithm prefers."""
    a = spectrum.stack(count, d, seed)
    if a is None:
        return None
    if isinstance(spectrum, Synthetic):
        return DecomposedStack(
            label(spectrum), a, spectrum.eigenvalues(d).expand(len(a), d), orthogonal(count, d, seed)
        )
    return DecomposedStack(label(spectrum), a, *torch.linalg.eigh(a))


@dataclass(frozen=True)
class StorageProblem:
    """A stack to store, and the root that is computed from what comes back.

    exponent, ridge: e and r / lambda_max of the root (A + r I)^-e.
    device, dtype: of the tensor that the quantizer is given.
    """

    stack: DecomposedStack
    exponent: Fraction
    ridge: float
    device: torch.device
    dtype: torch.dtype

    def exact(self, role: Role) -> Tensor:
        """The matrix that decoded matrices are compared with, float64."""
        return self.root(self.stack.a) if role == "root" else self.stack.a

    def to_store(self, role: Role) -> Tensor:
        """The tensor that the quantizer is given."""
        x = self.stack.vectors if role == "basis" else self.exact(role)
        return x.to(self.device, self.dtype)

    def root(self, b: Tensor) -> Tensor:
        """(B + r I)^-e of symmetric matrices, eigenvalues below 0 taken for 0."""
        values, q = torch.linalg.eigh(b)
        values = values.clamp_min(0)
        values = values + self.ridge * values[:, -1:]
        root: Tensor = (q * values.pow(-float(self.exponent)).unsqueeze(1)) @ q.mT
        return root


@dataclass(frozen=True)
class StoredStack:
    """A stack `x` and the tensors `codes` that a quantizer stores for it after `step` writes."""

    quantizer: Quantizer
    x: Tensor
    role: Role
    seed: int
    codes: Encoded | None = None
    step: int = 0

    def encode(self) -> Encoded:
        """Encode x over the codes stored before, with random numbers as the optimizer gives them."""
        seeds = torch.arange(len(self.x), device=self.x.device) + self.seed

        def draw(like: Tensor, purpose: str) -> Tensor:
            steps = torch.full_like(seeds, self.step)
            return noise.uniform(seeds, steps, tuple(like.shape[1:]), like.dtype, zlib.crc32(purpose.encode()))

        return self.quantizer.encode(self.x, self.codes, draw)

    def decode(self) -> Tensor:
        """Decode the stack."""
        return self.quantizer.decode(self.codes or {}, Slot(tuple(self.x.shape[1:]), role=self.role), self.x.dtype)

    def traffic_over_copy(self) -> float:
        """Bytes moved by one encoding or decoding over those moved by a copy: x and codes, over x twice."""
        return (self.x.nbytes + self._code_bytes()) / (2 * self.x.nbytes)

    def bytes_per_entry(self) -> float:
        """Stored bytes per entry of the matrix; for a basis, with its eigenvalues."""
        total = self._code_bytes()
        if self.role == "basis":
            total += self.x[..., 0].numel() * self.x.element_size()
        return total / self.x.numel()

    def _code_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.codes or {}).values())


def store_repeatedly(quantizer: Quantizer, problem: StorageProblem, role: Role, times: int, seed: int) -> StoredStack:
    """Encode a stack `times` times, each time over the codes of the time before."""
    stored = StoredStack(quantizer, problem.to_store(role), role, seed)
    for step in range(1, times + 1):
        stored = StoredStack(quantizer, stored.x, role, seed, stored.encode(), step)
    return stored


def losses(problem: StorageProblem, role: Role, decoded: Tensor) -> dict[str, float]:
    """The fields of a row that compare the decoded stack with the stack that was given."""
    ok = decoded.isfinite().all(-1).all(-1).cpu()
    y, a = decoded.double().cpu()[ok], problem.exact(role)[ok]
    b = (y * problem.stack.values[ok].unsqueeze(1)) @ y.mT if role == "basis" else y
    even = symmetrized(b)
    basis = y if role == "basis" else torch.linalg.eigh(even.to(problem.dtype)).eigenvectors.double()
    rotated = basis.mT @ a @ basis
    off = rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))
    gram = basis.mT @ basis - identity_like(a)
    values = torch.linalg.eigvalsh(even)
    wanted, found = (a, even) if role == "root" else (problem.root(a), problem.root(even))
    return {
        "error": worst(relative_error(b, a)),
        "angle": worst(angle(b, a)),
        "largest": worst((b - a).abs().flatten(1).amax(1) / a.abs().flatten(1).amax(1)) if len(a) else math.nan,
        "orthogonality": worst(torch.linalg.matrix_norm(gram)) / a.shape[-1] ** 0.5,
        "off_diagonal": worst(torch.linalg.matrix_norm(off) / torch.linalg.matrix_norm(a)),
        "smallest": -worst(-values[:, 0] / values.abs().amax(-1)) if len(a) else math.nan,
        "root_error": worst(relative_error(found, wanted)),
        "root_angle": worst(angle(found, wanted)),
        "ok": float(ok.double().mean()),
    }
