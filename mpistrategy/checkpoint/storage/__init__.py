"""The files of a checkpoint: shards of arrays, the manifest, and the locks around them."""
