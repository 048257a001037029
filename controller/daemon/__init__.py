"""What runs: the loop, what it applies, and the API."""
