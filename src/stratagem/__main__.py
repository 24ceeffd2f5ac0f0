"""Where the program begins: `python -m stratagem cache ls`, or `stratagem cache ls`."""

from __future__ import annotations

from stratagem.starting import prepare


def main() -> None:
    """Run the command line."""
    prepare()
    from stratagem import cli

    cli.main()


if __name__ == "__main__":
    main()
