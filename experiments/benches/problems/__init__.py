"""Test problems of the benches: spectra, drifting statistics, recorded factors, gradients of single layers."""
