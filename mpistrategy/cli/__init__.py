"""The command line: run, doctor, bench, slurm, trace."""
