"""Steps whose gradients are reduced and applied by slices: each rank of a node updates its share of every copy."""
