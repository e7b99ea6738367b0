"""How values are laid out for a reduction, and what becomes of the sums."""
