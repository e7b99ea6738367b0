"""The Ranks over real MPI."""
