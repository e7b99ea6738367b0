"""What the doctor gathers about each rank, in plain values."""
