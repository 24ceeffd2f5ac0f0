"""One model in a process of its own: `python -m benchmarks.zoo.worker FILE FUNCTION`.

It prints its line again whenever there is more to say, so that the last one is left where the
process ends in another way.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from benchmarks.zoo.runner import Line
from benchmarks.zoo.trial import tried


def main() -> None:
    """Try the model that the command line names."""
    path, name = sys.argv[1:]
    out = sys.stdout

    def show(line: Line) -> None:
        print(json.dumps(line), file=out, flush=True)

    tried(Path(path), name, show)


if __name__ == "__main__":
    main()
