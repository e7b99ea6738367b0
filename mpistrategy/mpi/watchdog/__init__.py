"""Finds collectives that are late, names the ranks that are missing, and ends the job."""
