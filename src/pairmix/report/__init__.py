"""Results in, pictures out."""
