"""The `pierhead` command. Imported by nothing else: typer and rich cost the daemon memory it has better uses for."""
