"""Test problems: spectra, drifting statistics, recorded factors, gradients of single layers."""
