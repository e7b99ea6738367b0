"""Recordings of each rank's collectives, steps and spans, and the timeline of all ranks."""
