"""`python -m controller.cli`, installed in the image as `pierhead`."""

from __future__ import annotations

from controller.cli.app import main

main()
