"""What every layer above MPI works with: the Ranks, and how buffers in GPU memory travel."""
