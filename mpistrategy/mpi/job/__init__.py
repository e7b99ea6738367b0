"""The job: its launcher, its ranks, and how all of them end together."""
