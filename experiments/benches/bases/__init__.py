"""The bench of eigenbasis solvers: orthogonality, off-diagonal ratio and time on a drifting statistic."""
