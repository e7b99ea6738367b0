"""Strategy, StrategyExtended and ReplicaContext: the objects of tf.distribute."""
