"""All-reduces over several nodes."""
