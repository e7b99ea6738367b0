"""Arrays of NumPy, CuPy and other libraries: nests, dtypes, device strings and distributed values; nothing of ranks."""
