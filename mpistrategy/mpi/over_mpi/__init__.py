"""The Communicator over real MPI."""
