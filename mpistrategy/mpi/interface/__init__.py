"""What every layer above MPI works with: the Communicator, and buffers."""
