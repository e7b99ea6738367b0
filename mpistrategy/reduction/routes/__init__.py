"""The ways that the bytes of a reduction take, one file each."""
