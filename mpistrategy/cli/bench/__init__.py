"""`mpistrategy bench`: what the library's collectives cost, beside what a user would call instead, in one run."""
