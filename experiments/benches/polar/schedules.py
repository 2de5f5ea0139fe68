"""Published schedules of odd polynomials a X + b (X X^T) X + c (X X^T)^2 X for polar factors."""

JORDAN = [[3.4445, -4.7750, 2.0315]]
"""One triple for every step (Jordan et al. 2024, Muon)."""

YOU = [
    [4.0848, -6.8946, 2.9270],
    [3.9505, -6.3029, 2.6377],
    [3.7418, -5.5913, 2.3037],
    [2.8769, -3.1427, 1.2046],
    [2.8366, -3.0525, 1.2012],
]
"""Five steps by J. You, as used in modded-nanogpt (train_gpt_medium)."""

POLAR_EXPRESS = [
    [8.156554524902461, -22.48329292557795, 15.878769915207462],
    [4.042929935166739, -2.808917465908714, 0.5000178451051316],
    [3.8916678022926607, -2.772484153217685, 0.5060648178503393],
    [3.285753657755655, -2.3681294933425376, 0.46449024233003106],
    [2.3465413258596377, -1.7097828382687081, 0.42323551169305323],
]
"""Five steps of Polar Express (Amsel et al. 2025, arXiv:2505.16932) for values in [1e-3, 1] with a safety of 2 %."""

CUBIC = [[1.5, -0.5, 0.0]]
"""Newton-Schulz's own step, which never exceeds 1."""
