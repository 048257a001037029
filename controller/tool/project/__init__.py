"""A user's project on this machine: its files, its stack, and how the stack starts and ends."""
