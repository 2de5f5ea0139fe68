"""Rows of the bench of quantizers."""

from __future__ import annotations

from dataclasses import dataclass

from ..common.results import BenchRow


@dataclass(frozen=True)
class QuantizerRow(BenchRow):
    """One quantizer on one stack A = V Diag(l) V^T; against float64, the worst of the matrices decoded as finite.

    B is the decoded matrix; for a decoded basis W, B = W Diag(l) W^T with l exact. For the role root, read A^-e for A.

    role: what is stored: A (statistic), V (basis) or the root of A (root).
    error: ||B - A||_F / ||A||_F.
    angle: between B and A, in degrees.
    largest: max |B - A| / max |A|.
    orthogonality: ||W^T W - I||_F / sqrt(d), W the decoded basis or, in other roles, the eigenvectors of B in `dtype`.
    off_diagonal: ||offdiag(W^T A W)||_F / ||A||_F.
    smallest: least eigenvalue of B over the largest in size.
    root_error, root_angle: of (B + r I)^-e, eigenvalues of B below 0 taken for 0, to (A + r I)^-e.
    ok: share of the matrices decoded as finite.
    bytes: stored bytes per entry of A, l included.
    encode_ms, decode_ms: milliseconds per matrix.
    encode_speed, decode_speed: bytes read and written per second, over those of `clone` on the same stack; on small
        stacks this measures the overhead of calls.
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
