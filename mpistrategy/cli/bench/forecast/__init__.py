"""`mpistrategy bench --forecast`: how long an all-reduce would take on other nodes than these."""
