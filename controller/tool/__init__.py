"""What `pierhead` and `make` do: the commands, the project that they are about, and what they print.

The daemon never imports it, as typer and rich would cost it memory.
"""

from __future__ import annotations

from pierhead.interrupt import end_at_ctrl_c


def main() -> None:
    """Run the command line. Does not return where another program takes over."""
    end_at_ctrl_c()
    from .place import main as run

    run()
