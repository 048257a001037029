"""Which requests run together: `@batch`."""
