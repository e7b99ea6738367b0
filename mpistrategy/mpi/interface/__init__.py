"""What every layer above MPI works with: the Communicator, the current one, and buffers."""
