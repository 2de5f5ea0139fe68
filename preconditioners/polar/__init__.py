"""Spectral descent (Muon, Dion): the polar factor of a direction, and the solvers that compute it."""
