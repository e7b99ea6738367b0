"""Arrays of NumPy, CuPy and other libraries: nests, dtypes, device strings, distributed values.  No ranks, no MPI."""
