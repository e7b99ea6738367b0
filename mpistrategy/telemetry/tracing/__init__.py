"""Recordings of what each rank did, and the timeline of all of them."""
