"""The commands, by what they do: look, follow, change, and those that need no running stack."""
