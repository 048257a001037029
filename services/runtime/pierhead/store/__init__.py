"""The shared store: a few keys that all replicas of a stack share. `pierhead.shared_store` is what users import."""
