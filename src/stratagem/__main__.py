"""Where the program begins: `python -m stratagem cache ls`, or `stratagem cache ls`."""

from __future__ import annotations

from stratagem.basics.startup import prepare


def main() -> None:
    """Run the command line."""
    prepare()
    from stratagem.cli import app

    app.main()


if __name__ == "__main__":
    main()
