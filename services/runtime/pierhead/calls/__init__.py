"""Calls from a handle to the replicas of a service: choosing one, waiting in the queue, retrying, discovery."""
