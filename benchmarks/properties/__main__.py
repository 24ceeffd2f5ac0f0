"""Do predictions have the properties that every prediction must have?

    python -m benchmarks.properties [--only NAME] [--scale SHARE] [--seed SEED]

Draws plans, models and clusters at random, and prints one JSON object a property: how many cases
were `tried`, by how much the `worst` is over what is allowed (up to 0 it holds), how many
`failed`, and the worst case if one did.
"""

from __future__ import annotations

import argparse
import json

from benchmarks.properties.readers import shared_readers
from benchmarks.properties.states import sharded_state, waiting_gradients
from benchmarks.properties.steps import (
    affine_layers,
    bubbles,
    faster_hardware,
    interleaving,
    orders,
)
from benchmarks.properties.tries import Property, score

PROPERTIES: dict[str, tuple[Property, int]] = {
    "simulated in the order of the program": (orders, 180),
    "faster hardware is never slower": (faster_hardware, 280),
    "interleaving is never slower where links are free": (interleaving, 60),
    "layers add up": (affine_layers, 30),
    "bubbles are the papers'": (bubbles, 100),
    "readers share conversions": (shared_readers, 40),
    "state under ZeRO 3 is shared out": (sharded_state, 255),
    "a gradient of each parameter waits": (waiting_gradients, 200),
}
"""By name a property, and how many cases are tried."""


def main() -> None:
    """Try all properties."""
    arguments = _arguments()
    for name, (made, count) in PROPERTIES.items():
        if arguments.only in name:
            tried = max(1, round(count * arguments.scale))
            print(json.dumps(score(name, made, tried, arguments.seed)), flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", default="", help="part of the names of the properties to try")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the cases to try")
    parser.add_argument("--seed", type=int, default=0, help="of the cases")
    return parser.parse_args()


if __name__ == "__main__":
    main()
