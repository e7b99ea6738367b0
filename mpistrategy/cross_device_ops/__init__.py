"""Algorithms that turn the replicas' values into one."""
