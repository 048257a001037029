"""The command `pierhead`, as it is installed and as a clone has it."""

from __future__ import annotations

from .interrupt import end_at_ctrl_c


def main() -> None:
    """Run the command line. Does not return where another program takes over."""
    end_at_ctrl_c()
    from .place import main as run

    run()
