"""What every layer above MPI works with: the Ranks, and buffers."""
