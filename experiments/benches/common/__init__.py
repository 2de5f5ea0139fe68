"""What all benches share: the family of benches, rows, tables, figures, timing, declarations and fields."""
