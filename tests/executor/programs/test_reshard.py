"""Resharding: every conversion equals slicing the whole tensor, and backward is its adjoint."""

from __future__ import annotations

import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from stratagem.executor.backends.threads import run_local
from stratagem.executor.communication.communicator import Communicator
from stratagem.executor.resharding.conversions import run_steps, run_transfer
from stratagem.executor.resharding.seats import Seat, TensorSpec, mesh_groups
from stratagem.simulator.graph.placement import (
    FLAT,
    PARTIAL,
    REPLICATE,
    Partial,
    Pin,
    Placement,
    Placements,
    Shard,
    smallest_shard,
    splits_of,
)
from stratagem.simulator.hardware.device_mesh import AxisLink, DeviceMesh, MeshAxis
from stratagem.simulator.sharding.mesh_transfers import Transfer, tile_moves
from stratagem.simulator.sharding.resharding_paths import TRANSITIONS, Resharder, ReshardingStep
from stratagem.simulator.sharding.tensor_parts import (
    Box,
    TensorPart,
    intersection,
    part_at,
    part_of,
)
from tests.support.examples import examples
from tests.support.plans import crossed

torch.set_num_threads(1)

LINK = AxisLink(1e-6, 1e-9, False, False)
RANKS_OFFSET = 3
"""Devices are numbered from here, and ranks backwards, so that nobody takes one for the other."""


def make_mesh(shape: Sequence[int], first: int = RANKS_OFFSET) -> DeviceMesh:
    axes = tuple(MeshAxis(f"axis{i}", n) for i, n in enumerate(shape))
    return DeviceMesh(axes, tuple(range(first, first + math.prod(shape))))


def ranks_of(devices: Sequence[int]) -> dict[int, int]:
    """Which rank each device is: the last one is rank 0."""
    return {device: rank for rank, device in enumerate(reversed(devices))}


def is_whole(sizes: Sequence[int], placements: Placements, shape: Sequence[int]) -> bool:
    """Whether no shard is empty."""
    return all(
        smallest_shard(size, splits_of(placements, factor, shape)) > 0
        for factor, size in enumerate(sizes)
    )


def all_placements(
    sizes: Sequence[int], shape: Sequence[int], *, partial: bool
) -> list[Placements]:
    choices: list[list[Placement]] = [
        [
            REPLICATE,
            *([PARTIAL] if partial else []),
            *(Shard(f) for f in range(len(sizes))),
            *(Pin(i) for i in {0, n - 1}),
            FLAT,
        ]
        for n in shape
    ]
    return [p for p in itertools.product(*choices) if is_whole(sizes, p, shape)]


def addends(whole: Tensor, placements: Placements, shape: Sequence[int]) -> dict[tuple, Tensor]:
    """Per coordinates the whole tensor that is there, or a random addend of it where Partial."""
    found: dict[tuple[int, ...], Tensor] = {}
    pending = [axis for axis, p in enumerate(placements) if isinstance(p, Partial)]
    keys = list(itertools.product(*(range(shape[axis]) for axis in pending)))
    parts = [torch.randint_like(whole, -9, 9) for _ in keys[1:]]
    values = [whole - sum(parts, torch.zeros_like(whole)), *parts]
    by_key = dict(zip(keys, values, strict=True))
    for place in itertools.product(*map(range, shape)):
        found[place] = by_key[tuple(place[axis] for axis in pending)]
    return found


def local(whole: Tensor, placements: Placements, mesh: DeviceMesh, device: int) -> Tensor | None:
    """What a device holds of a tensor that is not Partial."""
    part = part_of(tuple(whole.shape), placements, mesh, device)
    return None if part is None else taken(whole, part)


def elements_of(part: TensorPart) -> list[tuple[int, ...]]:
    """The places in a tensor of the elements of a part, in order."""
    places = list(itertools.product(*(range(start, stop) for start, stop in part.box)))
    return places if part.span is None else places[slice(*part.span)]


def taken(whole: Tensor, part: TensorPart) -> Tensor:
    """A part of a tensor, picked element by element."""
    picked = [whole[place] for place in elements_of(part)]
    return torch.stack(picked).reshape(part.shape) if picked else whole.new_empty(part.shape)


def convert(
    values: dict[tuple[int, ...], Tensor],
    source: Placements,
    target: Placements,
    mesh: DeviceMesh,
    path: Sequence[ReshardingStep],
) -> dict[tuple[int, ...], Tensor | None]:
    """Run a path on every device; per coordinates what it has afterwards."""
    sizes = tuple(next(iter(values.values())).shape)
    ranks = ranks_of(mesh.devices)
    devices = {rank: device for device, rank in ranks.items()}

    def run(comm: Communicator) -> Tensor | None:
        seat = Seat(mesh, devices[comm.rank], ranks)
        comm.prepare(mesh_groups(mesh, ranks))
        value = values[seat.coordinates]
        spec = TensorSpec(sizes, value.dtype, source)
        mine = local(value, source, mesh, seat.device)
        return run_steps(mine, spec, path, seat, comm)

    results = run_local(mesh.num_devices, run, timeout=30)
    return {mesh.coordinates(devices[rank]): got for rank, got in enumerate(results)}


def path_between(
    sizes: tuple[int, ...], source: Placements, target: Placements, shape: tuple[int, ...]
) -> tuple[ReshardingStep, ...] | None:
    try:
        return Resharder(shape, [LINK] * len(shape)).path(sizes, 4, source, target)
    except ValueError:
        return None


def check_conversion(
    sizes: tuple[int, ...], source: Placements, target: Placements, shape: tuple[int, ...]
) -> Counter[tuple[type, type]]:
    """Convert a random tensor of integers and compare with slices of the whole."""
    path = path_between(sizes, source, target, shape)
    if path is None:
        return Counter()
    mesh = make_mesh(shape)
    whole = torch.randint(-50, 50, sizes)
    values = addends(whole, source, shape)
    got = convert(values, source, target, mesh, path)
    pending = [axis for axis, p in enumerate(target) if isinstance(p, Partial)]
    for device in mesh.devices:
        place = mesh.coordinates(device)
        expected = local(values[place] if pending else whole, target, mesh, device)
        result = got[place]
        if expected is None:
            assert result is None, (source, target)
        else:
            assert result is not None
            assert torch.equal(result, expected), (sizes, source, target, shape, place)
    return Counter((type(s.source), type(s.target)) for s in path)


def test_every_conversion_on_one_axis():
    seen: Counter[tuple[type, type]] = Counter()
    sizes, shape = (5, 8), (3,)
    targets = all_placements(sizes, shape, partial=False)
    for source in all_placements(sizes, shape, partial=True):
        for target in targets:
            seen += check_conversion(sizes, source, target, shape)
    assert seen.keys() == TRANSITIONS.keys()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "shape"),
    [((7, 5), (2, 2)), ((11,), (2, 3)), ((5, 3, 4), (3, 2)), ((9, 4), (2, 2, 2))],
)
def test_random_conversions_on_several_axes(sizes, shape):
    chosen = random.Random(sum(sizes))
    sources = all_placements(sizes, shape, partial=True)
    targets = all_placements(sizes, shape, partial=False)
    for _ in range(60):
        check_conversion(sizes, chosen.choice(sources), chosen.choice(targets), shape)


@pytest.mark.slow
def test_nested_and_uneven_shards():
    """One factor over all axes, in and out, next to conversions that must undo the nesting."""
    nested: Placements = (Shard(0), Shard(0), Shard(0))
    for target in all_placements((11, 2), (2, 2, 2), partial=False)[::3]:
        check_conversion((11, 2), nested, target, (2, 2, 2))
        check_conversion((11, 2), target, nested, (2, 2, 2))


def test_a_partial_axis_stays_partial():
    """Only other axes are touched, on every addend."""
    check_conversion((6, 4), (PARTIAL, Shard(0)), (PARTIAL, Shard(1)), (2, 3))
    check_conversion((6, 4), (Shard(1), PARTIAL), (REPLICATE, PARTIAL), (2, 3))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.int64, torch.float64])
def test_dtypes(dtype):
    values = (torch.arange(24).reshape(6, 4) % 3).to(dtype)
    for source, target in itertools.permutations([REPLICATE, Shard(0), Shard(1), Pin(1)], 2):
        path = path_between((6, 4), (source,), (target,), (2,))
        assert path is not None
        mesh = make_mesh((2,))
        got = convert({(0,): values, (1,): values}, (source,), (target,), mesh, path)
        for device in mesh.devices:
            expected, result = (
                local(values, (target,), mesh, device),
                got[mesh.coordinates(device)],
            )
            assert (result is None) == (expected is None)
            assert expected is None or torch.equal(result, expected)
            assert result is None or result.dtype == dtype


def test_a_scalar():
    check_conversion((), (PARTIAL, PARTIAL), (REPLICATE, REPLICATE), (2, 3))
    check_conversion((), (PARTIAL, REPLICATE), (REPLICATE, Pin(1)), (2, 3))
    check_conversion((), (Pin(0), REPLICATE), (REPLICATE, Pin(1)), (2, 3))


def test_a_wrong_local_shape_is_named():
    mesh = make_mesh((2,), first=0)

    def run(comm: Communicator):
        spec = TensorSpec((5, 4), torch.float32, (Shard(0),))
        run_steps(torch.zeros(3, 4), spec, (), Seat(mesh, comm.rank, {0: 0, 1: 1}), comm)

    with pytest.raises(ValueError, match=r"device 1 has a tensor of shape \(3, 4\).*\(2, 4\)"):
        run_local(2, run)


def test_steps_must_follow_one_another():
    spec = TensorSpec((4,), torch.float32, (REPLICATE,))
    (step,) = path_between((4,), (Shard(0),), (REPLICATE,), (2,)) or ()
    with pytest.raises(ValueError, match="the tensor is R on axis 0"):
        spec.after(step)


USED = "used by an operator that shards a dim which the tensor lacks"
"""A consumer's axis that reads the tensor replicated and makes a Partial gradient."""


@pytest.mark.parametrize("seed", crossed(range(40), every=4))
def test_backward_is_the_adjoint(seed):
    """A producer and a consumer with random placements: the gradient is that of one process.

    The producer's output lies as `made`; the consumer reads it as `read` and takes a linear
    functional of what it sees. Along an axis where it only works as a part (USED), each index has
    a functional of its own and the loss is their sum, so its gradients are Partial. What flows
    back must lie as `made`, but Replicate where that is Partial.
    """
    chosen = random.Random(seed)
    shape = chosen.choice([(2,), (3,), (2, 2), (3, 2), (2, 2, 2)])
    sizes = chosen.choice([(5, 4), (8,), (3, 6, 4), (9, 8)])
    made, read = (
        chosen.choice([p for p in all_placements(sizes, shape, partial=partial) if FLAT not in p])
        for partial in (True, False)
    )
    used = [p == REPLICATE and chosen.random() < 0.5 for p in read]
    back = tuple(PARTIAL if u else p for u, p in zip(used, read, strict=True))
    needed = tuple(REPLICATE if p == PARTIAL else p for p in made)
    there, home = (path_between(sizes, a, b, shape) for a, b in ((made, read), (back, needed)))
    if there is None or home is None:
        pytest.skip("no such conversion without an empty shard")
    mesh = make_mesh(shape)
    generator = torch.Generator().manual_seed(seed)
    values = addends(torch.randint(-50, 50, sizes, generator=generator).double(), made, shape)
    functionals = {
        key: torch.randint(-9, 9, sizes, generator=generator).double()
        for key in itertools.product(
            *(range(n if u else 1) for n, u in zip(shape, used, strict=True))
        )
    }

    def functional_at(place: tuple[int, ...]) -> Tensor:
        return functionals[tuple(i if u else 0 for i, u in zip(place, used, strict=True))]

    parts = [values[place].clone().requires_grad_() for place in sum_places(made, shape)]
    seen = torch.stack(parts).sum(0)
    loss = sum((seen * f).sum() for f in functionals.values())
    loss.backward()

    arrived = convert(values, made, read, mesh, there)
    for device in mesh.devices:
        view = local(seen.detach(), read, mesh, device)
        got = arrived[mesh.coordinates(device)]
        assert (view is None and got is None) or torch.equal(view, got)

    gradients = {place: functional_at(place) for place in itertools.product(*map(range, shape))}
    returned = convert(gradients, back, needed, mesh, home)
    for device in mesh.devices:
        got = returned[mesh.coordinates(device)]
        for part in parts:
            expected = local(part.grad, needed, mesh, device)
            assert (expected is None and got is None) or torch.equal(expected, got)


def sum_places(placements: Placements, shape: Sequence[int]) -> list[tuple[int, ...]]:
    """Coordinates of one of each addend."""
    ranges = (range(n if p == PARTIAL else 1) for n, p in zip(shape, placements, strict=True))
    return list(itertools.product(*ranges))


def random_side(
    draw: st.DrawFn, sizes: tuple[int, ...], first: int
) -> tuple[DeviceMesh, Placements]:
    shape = draw(st.sampled_from([(1,), (2,), (3,), (2, 2), (2, 3), (1, 4)]))
    placements = draw(st.sampled_from(all_placements(sizes, shape, partial=False)))
    return make_mesh(shape, first), placements


@st.composite
def transfers(draw: st.DrawFn) -> Transfer:
    """Any two meshes: apart, overlapping or the same devices."""
    sizes = draw(st.sampled_from([(7, 4), (12,), (3, 5, 4), ()]))
    source, have = random_side(draw, sizes, 0)
    target, want = random_side(draw, sizes, draw(st.sampled_from([0, 2, 6])))
    return Transfer(sizes, source, have, target, want)


def has(part: TensorPart, box: Box) -> bool:
    """Whether a box is inside one piece of a part."""
    return any(intersection(piece, box) == box for piece in part.pieces)


class TestTransfers:
    @given(transfers())
    @settings(max_examples=examples(60))
    def test_everybody_gets_what_it_needs(self, transfer):
        devices = sorted({*transfer.source_mesh.devices, *transfer.target_mesh.devices})
        ranks = ranks_of(devices)
        whole = torch.arange(math.prod(transfer.sizes)).reshape(transfer.sizes)

        def run(comm: Communicator) -> Tensor | None:
            device = devices[len(devices) - 1 - comm.rank]
            part = transfer.source_part(device)
            mine = None if part is None else taken(whole, part)
            return run_transfer(mine, transfer, whole.dtype, device, ranks, comm)

        results = run_local(len(devices), run, timeout=30)
        for device in devices:
            part, got = transfer.target_part(device), results[ranks[device]]
            if part is None:
                assert got is None
            else:
                assert got is not None
                assert torch.equal(got, taken(whole, part))

    @given(transfers())
    @settings(max_examples=examples(100))
    def test_moves_tile_each_box_once(self, transfer):
        received: Counter[int] = Counter()
        for move in transfer.moves:
            held, wanted = transfer.source_part(move.sender), transfer.target_part(move.receiver)
            assert held is not None
            assert wanted is not None
            assert move.elements > 0
            assert has(held, move.box)
            assert has(wanted, move.box)
            received[move.receiver] += move.elements
            mine = transfer.source_part(move.receiver)
            if mine is not None and has(mine, move.box):
                assert move.sender == move.receiver
        for device in transfer.target_mesh.devices:
            part = transfer.target_part(device)
            assert received[device] == (0 if part is None else part.elements)

    def test_a_replicated_source_shares_the_work(self):
        source, target = make_mesh((4,), 0), make_mesh((8,), 4)
        moves = tile_moves((16,), source, (REPLICATE,), target, (REPLICATE,))
        assert Counter(m.sender for m in moves) == {0: 2, 1: 2, 2: 2, 3: 2}

    def test_equal_meshes_send_to_the_same_position(self):
        source, target = make_mesh((2, 2), 0), make_mesh((2, 2), 4)
        for placements in [(REPLICATE, REPLICATE), (Shard(0), REPLICATE), (Shard(1), Shard(0))]:
            moves = tile_moves((8, 8), source, placements, target, placements)
            assert [(m.sender, m.receiver) for m in moves] == [(i, i + 4) for i in range(4)]

    def test_of_equal_holders_the_one_at_the_same_position_sends(self):
        source, target = make_mesh((2,), 0), make_mesh((2,), 2)
        (move,) = tile_moves((8,), source, (REPLICATE,), target, (Pin(1),))
        assert (move.sender, move.receiver) == (1, 3)

    def test_a_device_keeps_what_it_has(self):
        mesh = make_mesh((2,), 0)
        moves = tile_moves((8,), mesh, (REPLICATE,), mesh, (Shard(0),))
        assert [(m.sender, m.receiver, m.box) for m in moves] == [
            (0, 0, ((0, 4),)),
            (1, 1, ((4, 8),)),
        ]

    def test_a_pending_sum_is_refused(self):
        mesh = make_mesh((2,), 0)
        with pytest.raises(ValueError, match=r"Partial on axis 'axis0' .* reduce it first"):
            tile_moves((8,), mesh, (PARTIAL,), mesh, (REPLICATE,))

    def test_too_few_placements_are_refused(self):
        mesh = make_mesh((2, 2), 0)
        with pytest.raises(ValueError, match="1 placements for a mesh of 2 axes"):
            Transfer((8,), mesh, (REPLICATE,), mesh, (REPLICATE, REPLICATE))


@given(st.integers(6, 40), st.sampled_from([(2, 3), (3, 2), (2, 2, 2)]), st.data())
def test_parts_tile_the_tensor(size, shape, data):
    placements = data.draw(st.sampled_from(all_placements((size, 8), shape, partial=False)))
    count: Counter[tuple[int, int]] = Counter()
    for place in itertools.product(*map(range, shape)):
        part = part_at((size, 8), placements, shape, place)
        if part is not None:
            count.update(elements_of(part))
    assert count.keys() == set(itertools.product(range(size), range(8)))
    copies = math.prod(n for n, p in zip(shape, placements, strict=True) if p == REPLICATE)
    assert set(count.values()) == {copies}


@given(st.lists(st.integers(1, 6), max_size=4), st.data())
def test_pieces_of_a_part_are_its_elements_in_order(sizes, data):
    box = tuple((first, first + size) for first, size in enumerate(sizes, 2))
    start, stop = sorted(data.draw(st.integers(0, math.prod(sizes))) for _ in range(2))
    part = TensorPart(box, (start, stop))
    boxes = [list(itertools.product(*(range(a, b) for a, b in piece))) for piece in part.pieces]
    assert [place for places in boxes for place in places] == elements_of(part)
    assert all(boxes)
    assert len(boxes) <= max(1, 2 * len(sizes) - 1)
    before = 0
    for piece, places in zip(part.pieces, boxes, strict=True):
        assert part.piece_around(piece) == (before, piece)
        before += len(places)


@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 1, 2), (8,)])
@pytest.mark.parametrize("sizes", [(1,), (7,), (5, 9), ()])
def test_ranges_are_those_of_a_padded_row(sizes, shape):
    """What is flat is cut as an array is that is filled up to a multiple, last axis first."""
    row = torch.arange(math.prod(sizes))
    for place in itertools.product(*map(range, shape)):
        left = row
        for ways, index in reversed(list(zip(shape, place, strict=True))):
            length = -(-len(left) // ways)
            left = left[index * length : (index + 1) * length]
        part = part_at(sizes, (FLAT,) * len(shape), shape, place)
        assert part is not None
        assert torch.equal(taken(row.reshape(sizes), part), left)


def test_sums_over_fast_links_come_first():
    """The last axis cuts first: over the others goes only what is left."""
    steps = Resharder((4, 8), [LINK] * 2).path((64,), 4, (PARTIAL,) * 2, (FLAT,) * 2)
    assert [(step.axis, step.elements) for step in steps] == [(1, 64), (0, 8)]
    back = Resharder((4, 8), [LINK] * 2).path((64,), 4, (FLAT,) * 2, (REPLICATE,) * 2)
    assert [(step.axis, step.elements) for step in back] == [(0, 8), (1, 64)]


def test_a_box_that_is_in_no_piece_is_refused():
    with pytest.raises(ValueError, match=r"box \(\(0, 2\),\) is in none of the pieces"):
        TensorPart(((0, 4),), (1, 3)).piece_around(((0, 2),))
