"""A whole application in one process: its services, the front before them, reload on save, and its compose file."""
