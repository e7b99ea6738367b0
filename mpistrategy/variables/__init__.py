"""Variables: one copy on every replica, with policies for when and how the copies meet."""
