"""What all benches share: the family of benches, tables, figures, timing, declarations of what is compared."""
