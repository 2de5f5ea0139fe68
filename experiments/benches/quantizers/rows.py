"""What is measured of one quantizer on one stack of factors."""

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
from eigengraft.slots import Parts, Role, Slot

from ..common.bench import Row
from ..common.declarations import label
from ..common.timing import angle, relative_error, worst
from ..problems.spectra import Spectrum, Synthetic, orthogonal


@dataclass(frozen=True)
class QuantizerRow(Row):
    """One quantizer on one stack A = V Diag(l) V^T; against float64, the worst of the matrices that come back finite.

    role: what is stored: A (statistic), V (basis) or the root of A (root). B is what comes back instead of A, for a
    basis W it is W Diag(l) W^T with l exact. For the role root, read the root of A for A.
    error: ||B - A||_F / ||A||_F. angle: between B and A, degrees. largest: max |B - A| / max |A|.
    orthogonality: ||W^T W - I||_F / sqrt(d) with W the basis that comes back or, in other roles, the eigenvectors of B
    found in `dtype`; off_diagonal: what is off the diagonal of W^T A W, over ||A||_F.
    smallest: least eigenvalue of B over the largest in size. ok: the share of matrices that come back finite.
    root_error, root_angle: of (B + r I)^-e, eigenvalues of B below 0 taken for 0, to (A + r I)^-e.
    bytes: kept for each entry of A, l included. encode_ms, decode_ms: of one matrix.
    encode_speed, decode_speed: bytes read and written a second over those of `clone` on the same stack; stacks that
    are small measure calls.
    """

    spectrum: str
    condition: float
    size: int
    dtype: str
    role: str
    exponent: str
    error: float
    angle: float
    largest: float
    orthogonality: float
    off_diagonal: float
    smallest: float
    root_error: float
    root_angle: float
    ok: float
    bytes: float
    encode_ms: float
    decode_ms: float
    encode_speed: float
    decode_speed: float


@dataclass(frozen=True)
class Decomposed:
    """A `[N, d, d]`, l `[N, d]` and V, float64; name: of the spectrum."""

    name: str
    a: Tensor
    values: Tensor
    vectors: Tensor

    def condition(self) -> float:
        """Infinite where the rounding of float64 decides about the smallest eigenvalue."""
        low, high = self.values.amin(-1), self.values.amax(-1)
        rounding = self.a.shape[-1] * torch.finfo(torch.float64).eps * high
        return worst(torch.where(low > rounding, high / low, torch.inf))


def decomposed(spectrum: Spectrum, count: int, d: int, seed: int) -> Decomposed | None:
    """The stack of a spectrum; eigenvectors of equal eigenvalues are those drawn, not those an algorithm prefers."""
    a = spectrum.stack(count, d, seed)
    if a is None:
        return None
    if isinstance(spectrum, Synthetic):
        return Decomposed(label(spectrum), a, spectrum.eigenvalues(d).expand(len(a), d), orthogonal(count, d, seed))
    return Decomposed(label(spectrum), a, *torch.linalg.eigh(a))


@dataclass(frozen=True)
class Task:
    """What is to be stored, and the root that is wanted of it."""

    problem: Decomposed
    exponent: Fraction
    ridge: float
    device: torch.device
    dtype: torch.dtype

    def exact(self, role: Role) -> Tensor:
        """What is compared, float64."""
        return self.root(self.problem.a) if role == "root" else self.problem.a

    def stored(self, role: Role) -> Tensor:
        """What the quantizer is given."""
        x = self.problem.vectors if role == "basis" else self.exact(role)
        return x.to(self.device, self.dtype)

    def root(self, b: Tensor) -> Tensor:
        """(B + r I)^-e of symmetric matrices, eigenvalues below 0 taken for 0."""
        values, q = torch.linalg.eigh(b)
        values = values.clamp_min(0)
        values = values + self.ridge * values[:, -1:]
        root: Tensor = (q * values.pow(-float(self.exponent)).unsqueeze(1)) @ q.mT
        return root


@dataclass(frozen=True)
class Kept:
    """A stack as a quantizer keeps it."""

    quantizer: Quantizer
    x: Tensor
    role: Role
    seed: int
    parts: Parts | None = None
    step: int = 0

    def write(self) -> Parts:
        """X over what is kept, with random numbers as the optimizer gives them."""
        seeds = torch.arange(len(self.x), device=self.x.device) + self.seed

        def draw(like: Tensor, purpose: str) -> Tensor:
            steps = torch.full_like(seeds, self.step)
            return noise.uniform(seeds, steps, tuple(like.shape[1:]), like.dtype, zlib.crc32(purpose.encode()))

        return self.quantizer.encode(self.x, self.parts, draw)

    def read(self) -> Tensor:
        """What comes back."""
        return self.quantizer.decode(self.parts or {}, Slot(tuple(self.x.shape[1:]), role=self.role), self.x.dtype)

    def share_of_copy(self) -> float:
        """Bytes that a writing or a reading moves over those that a copy does: numbers and parts, numbers twice."""
        return (self.x.nbytes + sum(part.nbytes for part in (self.parts or {}).values())) / (2 * self.x.nbytes)

    def bytes(self) -> float:
        """For each entry of the matrix; of a basis, with its eigenvalues."""
        total = sum(part.nbytes for part in (self.parts or {}).values())
        if self.role == "basis":
            total += self.x[..., 0].numel() * self.x.element_size()
        return total / self.x.numel()


def write(quantizer: Quantizer, task: Task, role: Role, times: int, seed: int) -> Kept:
    """Written `times` times over what was kept before."""
    kept = Kept(quantizer, task.stored(role), role, seed)
    for step in range(1, times + 1):
        kept = Kept(quantizer, kept.x, role, seed, kept.write(), step)
    return kept


def losses(task: Task, role: Role, back: Tensor) -> dict[str, float]:
    """The fields of a row that compare what comes back with what was given."""
    ok = back.isfinite().all(-1).all(-1).cpu()
    y, a = back.double().cpu()[ok], task.exact(role)[ok]
    b = (y * task.problem.values[ok].unsqueeze(1)) @ y.mT if role == "basis" else y
    even = symmetrized(b)
    basis = y if role == "basis" else torch.linalg.eigh(even.to(task.dtype)).eigenvectors.double()
    turned = basis.mT @ a @ basis
    off = turned - torch.diag_embed(turned.diagonal(dim1=-2, dim2=-1))
    gram = basis.mT @ basis - identity_like(a)
    values = torch.linalg.eigvalsh(even)
    wanted, found = (a, even) if role == "root" else (task.root(a), task.root(even))
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
