"""Job scripts for clusters: `mpistrategy slurm` and the files of the folder slurm/, rendered by one pure function."""
