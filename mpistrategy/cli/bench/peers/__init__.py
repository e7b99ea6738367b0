"""Other libraries that the benchmark measures where they are installed."""
