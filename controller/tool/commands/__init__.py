"""The commands by purpose: look, follow, change, and the commands that need no running stack."""
