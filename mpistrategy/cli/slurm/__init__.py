"""Job scripts for clusters: `mpistrategy slurm` and the files of the folder slurm/, both made by one pure function."""
