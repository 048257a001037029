"""The `pierhead` command. The daemon never imports it, as typer and rich would cost it memory."""
