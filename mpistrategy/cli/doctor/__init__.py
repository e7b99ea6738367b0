"""`mpistrategy doctor`: is this the job that was asked for, and will it run well?  One verdict a check."""
