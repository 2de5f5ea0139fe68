"""Formats that no shipped recipe uses, and no paper that is reproduced here. All laws of quantizers hold for them."""
