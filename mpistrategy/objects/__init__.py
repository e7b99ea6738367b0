"""What public objects have in common: how they are shown, copied and set."""
