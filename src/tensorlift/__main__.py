"""``python -m tensorlift`` and the script ``tensorlift``: the command line."""

import os
import sys

from tensorlift.cli import interrupts


def main() -> None:
    """Runs the command line; ends the process."""
    # Before all that takes time to import.
    interrupts.leave_at_once()
    _stand_in_for_closed_streams()
    from tensorlift.cli.main import main as run

    run()


def _stand_in_for_closed_streams() -> None:
    """Standard streams that the caller has closed lead nowhere: their numbers are not given to files of ours,
    and nothing that is printed is an error.
    """
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            # Until the process ends.
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115


if __name__ == "__main__":
    main()
