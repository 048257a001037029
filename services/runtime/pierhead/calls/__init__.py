"""Calls from a handle to the replicas of a service: choosing one, waiting in line, retrying, discovery."""
