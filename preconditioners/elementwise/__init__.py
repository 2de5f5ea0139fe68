"""Stages whose result for an entry depends on that entry, its row or its block: moments, signs, scales, clipping."""
