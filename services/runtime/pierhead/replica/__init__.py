"""The life of a replica's process: start, health, configuration, drain, stop."""
