"""The command line in this process."""

from __future__ import annotations

from typer.testing import CliRunner

from tensorlift.cli.main import app


def run(*arguments: object, **environment: str) -> tuple[int, str, str]:
    """``tensorlift`` with these words: its exit code, what it has printed, and what it has said on stderr."""
    runner = CliRunner(env={"NO_COLOR": "1", "COLUMNS": "200", **environment})
    result = runner.invoke(app, [str(one) for one in arguments])
    return result.exit_code, result.stdout, result.stderr
