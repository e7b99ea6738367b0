"""How values are laid out for a reduction, and how sums become results."""
