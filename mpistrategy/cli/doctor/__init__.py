"""`mpistrategy doctor`: is this job the one that was asked for, and is anything in its way?  One verdict a check."""
