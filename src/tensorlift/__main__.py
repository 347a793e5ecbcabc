"""``python -m tensorlift`` is the command line."""

from tensorlift.cli.main import main

if __name__ == "__main__":
    main()
