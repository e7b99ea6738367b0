"""What checkpoints keep that is more than arrays: one file a kind of object."""
