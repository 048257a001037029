"""Reads a project's compose files, checks them, and makes services of them."""
