"""Bench of eigenbasis solvers on a drifting statistic."""
