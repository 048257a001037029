"""`python -m controller.tool`: the command of a clone."""

from __future__ import annotations

from . import main

if __name__ == "__main__":
    main()
