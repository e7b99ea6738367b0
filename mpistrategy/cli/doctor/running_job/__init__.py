"""`mpistrategy doctor --job`: what the ranks of a running job are doing, seen from outside."""
