"""Bench of polar solvers: singular values, distance from U V^T, time."""
