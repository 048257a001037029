"""`python -m controller.tool.command`, installed in the image as `pierhead`."""

from __future__ import annotations

from pierhead.interrupt import end_at_ctrl_c


def _start() -> None:
    end_at_ctrl_c()
    from .app import main

    main()


_start()
