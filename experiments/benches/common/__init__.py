"""Shared by all benches: the family of benches, rows, tables, figures, timing, declarations and fields."""
