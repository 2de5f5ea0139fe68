"""The bench of polar solvers: singular values, distance from U V^T and time; published schedules."""
