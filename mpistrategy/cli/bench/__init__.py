"""`mpistrategy bench`: times the library's collectives and mpi4py's in the same run."""
