"""One step of an optimizer on many arrays in GPU memory at once: updates, norms, and whether numbers are finite."""
