"""What a problem is, what counts as solved, and how it is counted."""
