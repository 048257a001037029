"""Runs requests together in batches: `@batch`."""
