"""Thresholds: from which size on a route is the fastest, as measured or by default."""
