"""User code on an event loop of its own, in a thread beside the server's."""
