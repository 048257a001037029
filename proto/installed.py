"""What the wheel has as the package `pierhead_stack`, next to the files of the clone: the way to them.

Generic names (controller, simulator) stay out of site-packages: only the process of the command finds them, in here.
"""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Run the command `pierhead`."""
    from controller.tool import main as run

    run()
