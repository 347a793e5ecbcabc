"""``python -m tensorlift`` and the script ``tensorlift``: the command line."""

from tensorlift.cli import interrupts


def main() -> None:
    """Runs the command line; ends the process."""
    # Before all that takes time to import.
    interrupts.leave_at_once()
    from tensorlift.cli.main import main as run

    run()


if __name__ == "__main__":
    main()
