"""The routes that the bytes of a reduction take, one file each."""
