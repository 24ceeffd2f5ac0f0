"""What do founding papers of the field say, and what does this library say of the same?

    python -m benchmarks.papers [--only NAME] [--out FILE]
    python -m benchmarks.papers --page docs/papers.jsonl docs/papers.md

Prints one JSON object a claim: `name`, `paper`, `source`, `claim`; `published`, figures by what
each is of, in `unit`; `ours`, the same as measured here; `ratio`, that of ours to the published
figure where they are farthest apart; `within`, the range of ratios that counts as agreeing, and
whether all are in it, `agrees`; `reason`, what else was measured that tells why they are not; and
`seconds`, of all cores. NAME is part of a claim's name.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.papers.all_claims import CLAIMS
from benchmarks.papers.claims import line_of


def main() -> None:
    """Measure claims, or make the page of what was recorded."""
    arguments = _arguments()
    if arguments.page:
        from benchmarks.papers.page import page_of

        lines, page = arguments.page
        page.write_text(page_of(lines.read_text(encoding="utf-8")), encoding="utf-8")
        return
    chosen = [claim for claim in CLAIMS if arguments.only in claim.name]
    if not chosen:
        known = ", ".join(claim.name for claim in CLAIMS)
        raise SystemExit(f"no claim has {arguments.only!r} in its name; there are {known}")
    written = []
    for claim in chosen:
        written.append(json.dumps(line_of(claim), ensure_ascii=False))
        print(written[-1], flush=True)
    if arguments.out:
        arguments.out.write_text("".join(f"{line}\n" for line in written), encoding="utf-8")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.papers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--only", default="", metavar="NAME", help="part of a claim's name")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the lines there, too")
    parser.add_argument(
        "--page", nargs=2, type=Path, metavar=("LINES", "PAGE"), help="make a page of lines"
    )
    return parser.parse_args()


if __name__ == "__main__":
    main()
