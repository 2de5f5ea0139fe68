"""The bench of inverse-root solvers: error, residual and time over spectra, sizes and dtypes."""
