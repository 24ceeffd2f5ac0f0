"""Our kernels against torch's: arithmetic first, then speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from benchmarks.gpu.setting import Case, Figures, Setting
from benchmarks.gpu.worlds import kernels, seconds_of, wait_for_device
from stratagem.executor.cuda.dropout_words import DeviceWords
from stratagem.executor.cuda.fused_losses import FusedLosses
from stratagem.executor.optimizers.fused_optimizers import FusedAdam, FusedSGD
from stratagem.executor.state.gradient_lists import GradientChange, clip_scale, sum_of_powers
from stratagem.simulator.base.precision import is_full
from stratagem.simulator.kernel_times.training import Training
from stratagem.simulator.torch_ops.kernels.loss import summed_loss
from stratagem.simulator.torch_ops.kernels.randomness import RandomStream, words

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
OPTIMIZERS = ("adam", "sgd")
STEPS = 5
RATE, DECAY = 1e-3, 0.1
REPEATS = 20
IGNORED = -100
PIECE = 512
"""Rows that torch has in float64 at a time."""
BYTES = {"adam": 28, "sgd": 12}
"""That an update of a float32 parameter moves; half a gradient less is a copy more."""


def cases(setting: Setting) -> list[Case]:
    """Every optimizer in every dtype of gradients, words of dropout, losses, and their speeds."""
    right = [
        Case(f"{optimizer}, {dtype}", partial(_update, setting, optimizer, dtype))
        for optimizer in OPTIMIZERS
        for dtype in DTYPES
    ]
    fast = [
        Case(f"speed of {optimizer}, {dtype}", partial(_update_speed, setting, optimizer, dtype))
        for optimizer in OPTIMIZERS
        for dtype in ("float32", "bfloat16")
    ]
    return [
        *right,
        Case("adam, 148 tensors", partial(_many, setting)),
        Case("words of dropout", partial(_words, setting)),
        *[
            Case(f"cross entropy, {dtype}", partial(_loss, setting, dtype))
            for dtype in ("bfloat16", "float32", "float16")
        ],
        *fast,
        Case("speed of adam, 148 tensors", partial(_many_speed, setting)),
        Case("speed of words", partial(_words_speed, setting)),
        *[
            Case(f"speed of cross entropy, {dtype}", partial(_loss_speed, setting, dtype))
            for dtype in ("bfloat16", "float32")
        ],
    ]


def _ours(optimizer: str) -> FusedSGD:
    training = _training(optimizer)
    return FusedAdam(training) if optimizer == "adam" else FusedSGD(training)


def _training(optimizer: str) -> Training:
    return Training(optimizer=optimizer, learning_rate=RATE, weight_decay=DECAY)


def _theirs(optimizer: str, parameter: Tensor) -> torch.optim.Optimizer:
    if optimizer == "adam":
        eps = _training(optimizer).epsilon
        return torch.optim.AdamW([parameter], lr=RATE, weight_decay=DECAY, eps=eps, fused=True)
    return torch.optim.SGD([parameter], lr=RATE, weight_decay=DECAY, fused=True)


def _update(setting: Setting, optimizer: str, dtype: str) -> Figures:
    """Masters after some steps, and the copy that is written beside."""
    size = setting.size(1_000_003, 1003)
    with kernels(setting):
        update = _ours(optimizer)
        ours, theirs = (torch.linspace(-1, 1, size, device=setting.device) for _ in range(2))
        copy = None if is_full(dtype) else torch.empty_like(ours, dtype=DTYPES[dtype])
        by_torch = _theirs(optimizer, theirs.requires_grad_())
        for step in range(STEPS):
            by_torch.param_groups[0]["lr"] = RATE * (step + 1)
            update.now = (update.now[0]._replace(rate=RATE * (step + 1)),)
            gradient = torch.randn_like(ours).to(DTYPES[dtype])
            theirs.grad = gradient.float()
            update("p", ours, gradient, copy)
            by_torch.step()
        off = float((ours - theirs.detach()).abs().max() / theirs.detach().abs().max())
        same = copy is None or bool(torch.equal(copy, ours.to(DTYPES[dtype])))
    return {"error": off, "copy_is_rounded": same, "agrees": off < 1e-5 and same}


def _update_speed(setting: Setting, optimizer: str, dtype: str) -> Figures:
    size = setting.size(1 << 27, 1 << 10)
    with kernels(setting):
        update = _ours(optimizer)
        ours, theirs = (torch.zeros(size, device=setting.device) for _ in range(2))
        copy = None if is_full(dtype) else torch.empty_like(ours, dtype=DTYPES[dtype])
        by_torch = _theirs(optimizer, theirs.requires_grad_())
        gradient = torch.randn(size, device=setting.device, dtype=DTYPES[dtype])
        theirs.grad = gradient.float()

        def mine() -> None:
            update("p", ours, gradient, copy)

        spent = [_best(setting, run) for run in (mine, by_torch.step)]
    moved = size * BYTES[optimizer]
    return {
        "ours_ms": 1e3 * spent[0],
        "theirs_ms": 1e3 * spent[1],
        "ratio": spent[0] / spent[1],
        "ours_gb_s": moved / spent[0] / 1e9,
    }


def _shapes(setting: Setting) -> list[tuple[int, ...]]:
    """Of all parameters of GPT-2 of 124 million: an embedding, products and biases."""
    hidden, vocabulary = setting.size(768, 12), setting.size(50257, 101)
    norm = [(hidden,)] * 2
    first, second, third, fourth = (
        [(n * hidden, m * hidden), (m * hidden,)] for n, m in ((1, 3), (1, 1), (1, 4), (4, 1))
    )
    layer = [*norm, *first, *second, *norm, *third, *fourth]
    return [(vocabulary, hidden), (setting.size(1024, 16), hidden), *(12 * layer), *norm]


def _changes(setting: Setting, seed: int) -> list[GradientChange]:
    """Masters in float32, gradients in bfloat16, and copies in it."""
    generator = torch.Generator(setting.device).manual_seed(seed)
    made = []
    for n, shape in enumerate(_shapes(setting)):
        master = torch.randn(shape, generator=generator, device=setting.device) / 50
        gradient = torch.randn(shape, generator=generator, device=setting.device).bfloat16()
        made.append(GradientChange(str(n), master, gradient, master.bfloat16()))
    return made


def _torch_twin(changes: Sequence[GradientChange]) -> tuple[list[Tensor], torch.optim.Optimizer]:
    """Parameters in float32 with the same gradients, and torch's kernel for them."""
    theirs = [change.parameter.clone().requires_grad_() for change in changes]
    for parameter, change in zip(theirs, changes, strict=True):
        parameter.grad = change.gradient.float()
    eps = _training("adam").epsilon
    made = torch.optim.AdamW(theirs, lr=RATE, weight_decay=DECAY, eps=eps, fused=True)
    return theirs, made


def _many(setting: Setting) -> Figures:
    """All parameters of a model in few launches, clipped, against torch's clipping and kernel."""
    changes = _changes(setting, 1)
    theirs, by_torch = _torch_twin(changes)
    with kernels(setting):
        update = _ours("adam")
        for step in range(STEPS):
            norm = sum_of_powers([each.gradient for each in changes], theirs[0].device).sqrt()
            longest = float(norm) / (step + 2)
            update.all_of(changes, clip_scale(norm, longest).float())
            for parameter, change in zip(theirs, changes, strict=True):
                parameter.grad = change.gradient.float()
            torch.nn.utils.clip_grad_norm_(theirs, longest)
            by_torch.step()
    pairs = zip(changes, theirs, strict=True)
    off = max(
        float((ours.parameter - other.detach()).abs().max() / other.detach().abs().max())
        for ours, other in pairs
    )
    same = all(
        each.copy is not None and torch.equal(each.copy, each.parameter.bfloat16())
        for each in changes
    )
    return {"error": off, "copies_are_rounded": same, "agrees": off < 1e-5 and same}


def _many_speed(setting: Setting) -> Figures:
    """Beside torch's kernel on float32, which neither clips nor writes copies."""
    changes = _changes(setting, 1)
    _, by_torch = _torch_twin(changes)
    scale = torch.full((), 0.5, device=setting.device)
    with kernels(setting):
        update = _ours("adam")
        ours, theirs = (
            _best(setting, run) for run in (lambda: update.all_of(changes, scale), by_torch.step)
        )
        host = _host_seconds(setting, lambda: update.all_of(changes, scale))
    moved = sum(each.parameter.numel() for each in changes) * BYTES["adam"]
    return {
        "ours_ms": 1e3 * ours,
        "theirs_ms": 1e3 * theirs,
        "ratio": ours / theirs,
        "ours_gb_s": moved / ours / 1e9,
        "host_ms": 1e3 * host,
    }


def _host_seconds(setting: Setting, run: Callable[[], object]) -> float:
    """The least that the host takes to issue something to a device that has nothing to do."""
    spent = []
    for _ in range(REPEATS):
        wait_for_device(setting)
        begun = time.perf_counter()
        run()
        spent.append(time.perf_counter() - begun)
    wait_for_device(setting)
    return min(spent)


def _best(setting: Setting, run: Callable[[], object]) -> float:
    run()
    return min(seconds_of(setting, run, REPEATS) for _ in range(3))


def _words(setting: Setting) -> Figures:
    rows, width = torch.tensor([0, 3, 2**33], device=setting.device), 1003
    key = RandomStream(1).key("drop")
    with kernels(setting):
        fused = DeviceWords(torch.device(setting.device))
        same = [
            torch.equal(fused(rows, 5, width, step, key), words(rows, 5, width, step, key))
            for step in (0, 9, 2**32 - 1)
        ]
    return {"agrees": all(same)}


def _words_speed(setting: Setting) -> Figures:
    rows = torch.arange(setting.size(1 << 14, 8), device=setting.device)
    width, key = setting.size(1 << 12, 16), RandomStream(1).key("drop")
    with kernels(setting):
        fused = DeviceWords(torch.device(setting.device))
        ours = _best(setting, lambda: fused(rows, 0, width, 1, key))
        theirs = _best(setting, lambda: words(rows, 0, width, 1, key))
        mask = torch.empty(len(rows), width, device=setting.device)
        drawn = _best(setting, lambda: mask.bernoulli_(0.5))
    return {
        "ours_ms": 1e3 * ours,
        "of_torch_operators_ms": 1e3 * theirs,
        "bernoulli_ms": 1e3 * drawn,
        "ratio": ours / theirs,
    }


def _loss(setting: Setting, dtype: str) -> Figures:
    """Whole rows, and rows that lie apart and begin anywhere, some ignored."""
    generator = torch.Generator(setting.device).manual_seed(0)
    errors: dict[str, float] = {}
    with kernels(setting):
        for name, rows, classes, first in (
            ("whole", setting.size(8192, 16), setting.size(50304, 1003), 0),
            ("apart", setting.size(1000, 16), setting.size(50257, 1003), 3),
            ("few", setting.size(100_000, 40), setting.size(10, 10), 0),
        ):
            memory = torch.randn(
                (rows, classes + first), generator=generator, device=setting.device
            )
            logits = (3 * memory).to(DTYPES[dtype])[:, first:]
            target = torch.randint(classes, (rows,), generator=generator, device=setting.device)
            target[::7] = IGNORED
            made, gradient = _passes(logits, target, _our_loss)
            wanted, slope = _in_float64(logits, target)
            errors[f"{name}_loss"] = abs(float(made) / wanted - 1)
            errors[f"{name}_gradient"] = _largest_error(gradient, slope)
    # A probability near 1 less 1 is right to the rounding of 1.
    allowed = max(2 * torch.finfo(DTYPES[dtype]).eps, 2e-6)
    fine = [v < (1e-5 if n.endswith("loss") else allowed) for n, v in errors.items()]
    return {**errors, "agrees": all(fine)}


def _our_loss(logits: Tensor, target: Tensor) -> Tensor:
    return summed_loss(logits, target, IGNORED, FusedLosses())


def _passes(
    logits: Tensor, target: Tensor, loss: Callable[[Tensor, Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """A loss, and its gradient."""
    logits = logits.detach().requires_grad_()
    made = loss(logits, target)
    (gradient,) = torch.autograd.grad(made, logits)
    return made.detach(), gradient


def _in_float64(logits: Tensor, target: Tensor) -> tuple[float, list[Tensor]]:
    """Torch's loss, and its gradient in pieces: the whole would not fit every GPU."""
    total, slopes = 0.0, []
    for rows, wanted in zip(logits.split(PIECE), target.split(PIECE), strict=True):
        made, slope = _passes(rows.double(), wanted, _torch_loss)
        total += float(made)
        slopes.append(slope.float())
    return total, slopes


def _torch_loss(logits: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(logits, target, ignore_index=IGNORED, reduction="sum")


def _largest_error(gradient: Tensor, slopes: list[Tensor]) -> float:
    """Beside the gradient of 1 that each token has."""
    pairs = zip(gradient.split(PIECE), slopes, strict=True)
    return max(float((made.float() - slope).abs().max()) for made, slope in pairs)


def _loss_speed(setting: Setting, dtype: str) -> Figures:
    """Both passes of GPT-2's loss: ours, torch's in the dtype, and torch's on a float32 copy."""
    shape = setting.size(8192, 16), setting.size(50304, 1003)
    logits = torch.randn(shape, device=setting.device).to(DTYPES[dtype])
    target = torch.randint(shape[1], shape[:1], device=setting.device)
    ways = {
        "ours": _our_loss,
        "torch": _torch_loss,
        "torch_on_float32": lambda x, t: _torch_loss(x.float(), t),
    }
    found: Figures = {}
    with kernels(setting):
        for name, loss in ways.items():
            seconds = _best(setting, partial(_passes, logits, target, loss))
            found[f"{name}_ms"] = 1e3 * seconds
            if name == "ours":
                found["ours_gb_s"] = 3 * logits.nbytes / seconds / 1e9
    return found
