"""The GPUs of a node, which rank drives which, and whether MPI accepts their memory."""
