"""Stages that act on each entry, each row or one block: moments, signs, scales, clipping."""
