"""How the cases of the benchmark are timed and reported."""
