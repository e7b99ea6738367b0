"""Thresholds: from which size on which way of moving data is faster, as measured or by default."""
