"""What `pierhead` and `make` do: the commands, the project that they are about, and what they print.

The daemon never imports it, as typer and rich would cost it memory.
"""

from __future__ import annotations

import gc

from pierhead.interrupt import end_at_ctrl_c


def main() -> None:
    """Run the command line. Does not return where another program takes over."""
    end_at_ctrl_c()
    gc.set_threshold(100_000)  # what is imported is no garbage: to look for some takes a tenth of a command's time
    from .place import main as run

    run()
