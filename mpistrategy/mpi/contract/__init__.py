"""What all ranks agree on before the data of a collective move: call sites, signatures, comparison and reports."""
