"""Values of a model that ranks read from files: of each parameter no more than their own part.

A model of ordinary size is built by every rank, or by the process that starts them. One that no
process has the memory for is built without values (``torch.device("meta")``), and its parameters
and buffers lie in files of safetensors, as libraries of pretrained models write them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from stratagem.executor.state.parameter_parts import check_values, model_state
from stratagem.simulator.base.misspelt_names import few
from stratagem.simulator.torch_ops.capture.attributes import like, names_of_tensors, put_tensors
from stratagem.simulator.torch_ops.kernels.step_programs import as_pairs

ENDING = ".safetensors"

SAMPLED = 1 << 16
"""Elements of a tensor in a file by which ranks compare it: one machine's may hold another's."""


class WeightFiles(Mapping[str, Tensor]):
    """The tensors of a model, of which some are in files; those are mapped when asked for.

    Example:
        >>> state = weight_files(model, "llama-3-70b")  # doctest: +SKIP
        >>> state["lm_head.weight"].shape  # doctest: +SKIP
        torch.Size([128256, 8192])

    Args:
        held: those in memory, by name.
        places: of those in files: the file, and the name there.
    """

    def __init__(self, held: Mapping[str, Tensor], places: Mapping[str, tuple[str, str]]) -> None:
        self.held, self.places = dict(held), dict(places)
        self._opened: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Tensor:
        if name not in self.places:
            return self.held[name]
        file, there = self.places[name]
        if file not in self._opened:
            self._opened[file] = _open(Path(file))
        try:
            return as_pairs(self._opened[file].get_tensor(there))
        except (SafetensorError, OSError) as error:
            raise ValueError(f"{file} is damaged: {error}; write it again") from error

    def __contains__(self, name: object) -> bool:
        return name in self.places or name in self.held

    def __iter__(self) -> Iterator[str]:
        return iter({**self.held, **self.places})

    def __len__(self) -> int:
        return len(self.held.keys() | self.places.keys())

    def sample(self) -> dict[str, Tensor]:
        """Some elements of every tensor in a file, evenly apart, and all of those in memory."""
        flat = {name: self[name].reshape(-1) for name in self.places}
        some = {name: each[:: 1 + each.numel() // SAMPLED] for name, each in flat.items()}
        return {**self.held, **some}


def weight_files(model: nn.Module, path: str | Path) -> WeightFiles:
    """The state of a model whose parameters and buffers are in a file, or a folder of files.

    A buffer that is in no file is taken from the model, if it has values there and is none of its
    ``state_dict``. Of a parameter that modules share, files may have any name, or several with the
    same numbers.

    Example:
        >>> with torch.device("meta"):  # doctest: +SKIP
        ...     model = Llama(LLAMA_3_70B)
        >>> state = weight_files(model, "llama-3-70b")  # doctest: +SKIP
        >>> result = execute(plan, graph, state, batches)  # doctest: +SKIP

    Args:
        model: with or without values.
        path: a file of safetensors, or a folder of them, each tensor in one.

    Raises:
        ValueError: there are no such files, or one is damaged; a tensor is missing, is in two of
            them, or is none of the model's; one that modules share has other numbers by each name.
    """
    where = tensors_of(Path(path))
    names = names_of_tensors(model)
    places = {}
    for name, others in names.items():
        known = [other for other in others if other in where]
        if known:
            places[name] = where[known[0]]
            _check_alike(path, WeightFiles({}, {other: where[other] for other in known}))
    held = {name: each for name, each in model_state(model).items() if name not in places}
    saved = set(model.state_dict())
    missing = [
        name
        for name, others in names.items()
        if name not in places and (name not in held or not saved.isdisjoint(others))
    ]
    strange = sorted(where.keys() - {each for others in names.values() for each in others})
    if missing or strange:
        wrong = [f"lacks {few(missing)}"] if missing else []
        wrong += [f"has {few(strange)}, which the model has not"] if strange else []
        raise ValueError(
            f"{path} {' and '.join(wrong)}; give the weights of this model, under the names of "
            "its state_dict()"
        )
    return WeightFiles(held, places)


def starting_state(model: nn.Module, weights: str | Path | None) -> Mapping[str, Tensor]:
    """What a model's parameters and buffers are at first: in itself, or in files.

    Raises:
        ValueError: the model has no values, and there are no files; see `weight_files`.
    """
    if weights is not None:
        return weight_files(model, weights)
    state = model_state(model)
    check_values({name: state[name] for name, _ in model.named_parameters()})
    return state


def samples_of(state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """What two ranks compare to know that they have the same state: all that is in memory.

    Example:
        >>> samples_of({"bias": torch.zeros(2), "unused": torch.zeros(2, device="meta")})
        {'bias': tensor([0., 0.])}
    """
    some = state.sample() if isinstance(state, WeightFiles) else state
    return {name: each for name, each in some.items() if not each.is_meta}


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Give a model values, which then lie in this process's memory; what is shared stays so."""
    named = {**dict(model.named_buffers()), **dict(model.named_parameters())}
    made = {
        id(each): like(each, torch.empty_like(each, device="cpu")) if each.is_meta else each
        for each in named.values()
    }
    with torch.no_grad():
        for name, tensor in named.items():
            as_pairs(made[id(tensor)].detach()).copy_(state[name])
    put_tensors(model, made)


def _check_alike(path: str | Path, files: WeightFiles) -> None:
    """Refuse numbers of a shared tensor that depend on its name: they are another model's."""
    name, *others = files
    for other in others:
        one, two = files[name], files[other]
        same = one.dtype == two.dtype and one.shape == two.shape
        # By their bytes, which are compared where they lie.
        if not (same and torch.equal(*(x.reshape(-1).view(torch.uint8) for x in (one, two)))):
            raise ValueError(
                f"{path} has other numbers for {name!r} than for {other!r}, which are one "
                "tensor of the model; take a model that does not share it, or leave one of them"
            )


def tensors_of(path: Path) -> dict[str, tuple[str, str]]:
    """By name of each tensor in a file, or in the files of a folder, its file and its name there.

    Example:
        >>> tensors_of(Path("gpt2.safetensors"))["wte.weight"]  # doctest: +SKIP
        ('/models/gpt2.safetensors', 'wte.weight')

    Raises:
        ValueError: there are none, one is damaged, a tensor is in two, or files are missing.
    """
    files = sorted(path.glob(f"*{ENDING}")) if path.is_dir() else [path]
    if not files:
        raise ValueError(f"folder {path} has no file that ends in {ENDING}; name one that has")
    found: dict[str, tuple[str, str]] = {}
    for file in files:
        for name in _open(file).keys():  # noqa: SIM118  # It is no mapping.
            if name in found:
                raise ValueError(
                    f"{name!r} is in {found[name][0]} and in {file}; leave one of them in {path}"
                )
            found[name] = str(file.resolve()), name
    _check_index(path, found)
    return found


def _check_index(path: Path, found: Mapping[str, tuple[str, str]]) -> None:
    """Refuse a folder that lacks files of its own index."""
    index = path / f"model{ENDING}.index.json"
    if not index.is_file():
        return
    try:
        told = json.loads(index.read_text("utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{index} is no index of files of weights: {error}") from error
    lost = sorted({str(told[name]) for name in told if name not in found})
    if lost:
        raise ValueError(f"{path} lacks {few(lost)}, which {index.name} names; copy them, too")


def _open(file: Path) -> Any:
    try:
        return safe_open(file, framework="pt")
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{file} is no file of safetensors, or damaged: {error}") from error
