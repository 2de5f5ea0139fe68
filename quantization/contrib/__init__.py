"""Formats that neither a shipped recipe nor a study in papers/ uses. All laws of quantizers hold for them."""
