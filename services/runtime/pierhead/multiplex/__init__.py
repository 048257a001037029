"""Many models in one replica: `@multiplexed`."""
