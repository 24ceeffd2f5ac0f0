"""Published timings of kernels, read from `DIR/kernels` and put into one form.

Matrix products: Vidur's forward fp16 products of inference (A100, H100, A40: kernel times from a
profiler; several rows a shape, of which the median counts) and Aceso's operators of GPT, T5 (fp16)
and Wide-ResNet (fp32) on V100s, forward and backward, as a training step launches them.

Of Aceso's rows those are taken that hold one kind of kernel: the products of the perceptrons and
after the attention have no bias added (Megatron adds it in the next operator), but the row-wise
ones hold an all-reduce in forward under tensor parallelism and the column-wise ones in backward.
Rows under `HOST_BOUND_S` wait for the host.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import math
import statistics
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MIB = 2**20
HOST_BOUND_S = 250e-6
VIDUR_DEVICES = {"a100": "A100-80GB", "h100": "H100-80GB", "a40": "A40"}
SEQUENCE = 2048
DECODER_SEQUENCE = 512


@dataclass(frozen=True, order=True)
class Products:
    """One kind of timed work: forward one product, backward the two of its gradients.

    `family` is what shapes are held out by: the depth and columns of the product, or the model.
    """

    device: str
    precision: str
    kind: str
    family: str
    rows: int
    columns: int
    depth: int
    batch: int
    backward: bool
    winograd: bool = False
    data_elements: int = 0
    """Scalars moved by one product, where it is not all three matrices."""


Measured = dict[Products, float]
"""Seconds by what was timed."""


def kernel_folder(description: str | None) -> Path:
    """The folder of timings that the command line names with ``--data``."""
    parser = argparse.ArgumentParser(description=(description or "").partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="folder that holds kernels/")
    folder: Path = parser.parse_args().data / "kernels"
    if not folder.is_dir():
        parser.error(f"{folder} is not a folder; --data must name the one that holds kernels/")
    return folder


def rows_of(path: Path) -> Iterator[dict[str, str]]:
    """The lines of a gzipped table."""
    with gzip.open(path, "rt") as file:
        yield from csv.DictReader(file)


def vidur_products(folder: Path) -> Measured:
    """Median per shape of the fp16 products of inference."""
    found: dict[Products, list[float]] = defaultdict(list)
    for row in rows_of(folder / "vidur_gemm_fp16.csv.gz"):
        m, n, k = (int(float(row[name])) for name in "MNK")
        family = f"depth {k}"
        key = Products(VIDUR_DEVICES[row["gpu"]], "float16", "linear", family, m, n, k, 1, False)
        found[key].append(float(row["ms"]) * 1e-3)
    return {key: statistics.median(found[key]) for key in sorted(found)}


def aceso_products(folder: Path) -> Measured:
    """Median per shape of Aceso's matrix products and convolutions."""
    found: dict[Products, list[float]] = defaultdict(list)
    for row in rows_of(folder / "aceso_ops_v100.csv.gz"):
        for products in _aceso_row(row):
            seconds = float(row["bwd_us" if products.backward else "fwd_us"]) * 1e-6
            if seconds > HOST_BOUND_S:
                found[products].append(seconds)
    return {key: statistics.median(found[key]) for key in sorted(found)}


GPT_HIDDEN = {
    "scale-layer": 512,
    "350M": 1024,
    "1_3B": 2048,
    "2_6B": 2560,
    "6_7B": 4096,
    "13B": 5120,
}
HEAD_DIM = {"2_6B": 80, "6_7B": 128, "13B": 128, "3B": 128, "6B": 128, "11B": 128}
"""Of the models whose heads have not 64 dims; read off the sizes of scores and projections."""


def _aceso_row(row: dict[str, str]) -> Iterator[Products]:
    if row["family"] == "resnet":
        yield from _convolutions(row)
        return
    if row["algo"] != "0":
        return
    name, ways = row["op_name"], int(row["tp"])
    decoder = name.startswith("dec-")
    queries = int(row["mbs"]) * (DECODER_SEQUENCE if decoder else SEQUENCE)
    model = f"{row['family']} {row['size']}"
    hidden = GPT_HIDDEN.get(row["size"], 1024)
    weights = float(row["weights"]) * MIB / 2
    wide = round(weights / hidden) if weights else 0
    column = name[4:].startswith("MLP-GEMM-1")
    if column or name[4:].startswith(("MLP-GEMM-2", "attention-dense")):
        columns, depth = (wide, hidden) if column else (hidden, wide)
        for backward in (False, True):
            if ways == 1 or backward != column:
                yield Products(
                    "V100-16GB", "float16", "linear", model, queries, columns, depth, 1, backward
                )
    elif name[4:].startswith(("attention-score", "attention-context")):
        yield from _attention_products(row, model, name, queries)


def _attention_products(
    row: dict[str, str], model: str, name: str, queries: int
) -> Iterator[Products]:
    """Scores and their sums over values; heads are counted from the bytes of the result."""
    queries //= int(row["mbs"])
    keys = DECODER_SEQUENCE if name.endswith("-1") else SEQUENCE
    head = HEAD_DIM.get(row["size"], 64)
    scores = "score" in name
    columns, depth = (keys, head) if scores else (head, keys)
    batch = round(float(row["activations"]) * MIB / 2 / (queries * columns))
    for backward in (False, True):
        yield Products(
            "V100-16GB", "float16", "matmul", model, queries, columns, depth, batch, backward
        )


CHANNEL_STEP = 32


def _convolutions(row: dict[str, str]) -> Iterator[Products]:
    """Convolutions of the blocks, as implicit matrix products, on one device.

    One of the two ways to split holds a copy in forward, the other one in backward.
    """
    parts = row["op_name"].split("-")
    if row["tp"] != "1" or len(parts) != 4 or not parts[3].startswith("conv"):
        return
    block, first, which = int(parts[1]), parts[2] == "0" and int(parts[1]) > 0, int(parts[3][4:])
    strided = first and which == 2
    out_edge = 56 // 2 ** (block - (1 if first and which == 1 else 0))
    in_edge = out_edge * (2 if strided else 1)
    kernel = 9 if which == 2 else 1
    images = int(row["mbs"])
    out = _channels(float(row["activations"]) * MIB / 4 / (images * out_edge**2))
    into = _channels(float(row["weights"]) * MIB / 4 / (out * kernel))
    rows, depth = images * out_edge**2, into * kernel
    moved = images * (in_edge**2 * into + out_edge**2 * out) + out * depth
    yield Products(
        "V100-16GB",
        "float32",
        "conv2d",
        f"resnet {row['size']}",
        rows,
        out,
        depth,
        1,
        backward=row["algo"] == "0",
        winograd=kernel == 9 and not strided,
        data_elements=moved,
    )


def _channels(counted: float) -> int:
    """Memory is counted in whole MiB, channels come in steps."""
    return max(1, round(counted / CHANNEL_STEP)) * CHANNEL_STEP


@dataclass(frozen=True, order=True)
class Traffic:
    """One timed operator that only moves bytes, in `kernels` kernels."""

    device: str
    kind: str
    family: str
    nbytes: float
    kernels: int


MeasuredTraffic = dict[Traffic, float]


def vidur_traffic(folder: Path) -> MeasuredTraffic:
    """Median per shape of the additions of inference.

    Its norms, activations and embeddings are an inference engine's kernels, not those of training.
    """
    found: dict[Traffic, list[float]] = defaultdict(list)
    for row in rows_of(folder / "vidur_linear_ops.csv.gz"):
        if row["add_ms"]:
            scalars = 3 * int(row["num_tokens"]) * int(row["n_embd"])
            device = VIDUR_DEVICES[row["gpu"]]
            key = Traffic(device, "elementwise", row["model"], 2.0 * scalars, 1)
            found[key].append(float(row["add_ms"]) * 1e-3)
    return {key: statistics.median(found[key]) for key in sorted(found)}


ACESO_TRAFFIC = {
    "1st-layernorm": ("norm", "output", (2, 1), (5, 2)),
    "2nd-layernorm": ("norm", "output", (2, 1), (5, 2)),
    "attention-softmax": ("softmax", "scores", (2, 1), (3, 1)),
    "attention-dropout": ("activation", "dropped", (2.5, 1), (2.5, 1)),
    "MLP-gelu": ("activation", "scores", (2, 1), (3, 1)),
    "post-MLP-dropout": ("activation", "dropped", (7.5, 3), (3.5, 2)),
    "bn1": ("batch_norm", "scores", (3, 1), (5, 1)),
    "bn2": ("batch_norm", "scores", (3, 1), (5, 1)),
    "bn3": ("batch_norm", "scores", (3, 1), (5, 1)),
    "relu": ("elementwise", "scores", (2, 1), (3, 1)),
}
"""Kind, which size counts, and passes and kernels of forward and backward."""


def aceso_traffic(folder: Path) -> MeasuredTraffic:
    """Median per shape of the operators of GPT, T5 and Wide-ResNet that move bytes.

    The softmax of a causal model skips half of the scores; only that of encoders is taken.
    """
    found: dict[Traffic, list[float]] = defaultdict(list)
    for row in rows_of(folder / "aceso_ops_v100.csv.gz"):
        parts = row["op_name"].split("-", 3 if row["family"] == "resnet" else 1)
        name = parts[-1]
        cut = row["family"] == "resnet" and row["tp"] != "1"
        causal = name == "attention-softmax" and row["family"] == "gpt"
        if name not in ACESO_TRAFFIC or row["algo"] != "0" or cut or causal:
            continue
        kind, sized, forward, backward = ACESO_TRAFFIC[name]
        # What a dropout keeps holds a mask of a byte beside every half.
        one = float(row["activations"]) * MIB / (1.5 if sized == "dropped" else 1.0)
        model = f"{row['family']} {row['size']}"
        for end, (passes, kernels), column in (
            ("", forward, "fwd_us"),
            ("_backward", backward, "bwd_us"),
        ):
            seconds = float(row[column]) * 1e-6
            if seconds > HOST_BOUND_S:
                key = Traffic("V100-16GB", kind + end, model, passes * one, kernels)
                found[key].append(seconds)
    return {key: statistics.median(found[key]) for key in sorted(found)}


def roofline_seconds(products: Products, peak: float, bandwidth: float, itemsize: int) -> float:
    """The larger of arithmetic and memory time at the data sheet's peaks."""
    m, n, k = products.rows, products.columns, products.depth
    once = max(
        2.0 * m * n * k * products.batch / peak,
        data_bytes(products, itemsize) / bandwidth,
    )
    return once * (2 if products.backward else 1)


def data_bytes(products: Products, itemsize: int) -> float:
    """Bytes of both operands and the result of one product."""
    m, n, k = products.rows, products.columns, products.depth
    elements = products.data_elements or products.batch * (m * k + k * n + m * n)
    return float(itemsize * elements)


def log_ratio(said: float, measured: float) -> float:
    """How far a prediction is off, on a scale where twice and half are alike."""
    return math.log(said / measured)
