"""What the doctor prints."""
