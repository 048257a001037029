"""Runs user code on an event loop of its own, in a second thread."""
