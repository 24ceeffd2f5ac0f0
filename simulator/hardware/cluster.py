"""Clusters: nodes of devices and the links between them; files and presets."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, cached_property
from importlib import resources
from itertools import pairwise
from typing import ClassVar

import msgspec

from stratagem.simulator.base.field_types import check_arguments, check_fields, check_type
from stratagem.simulator.base.files import decode, encode, plain_number
from stratagem.simulator.base.hostile_texts import check_numbers
from stratagem.simulator.base.misspelt_names import unknown
from stratagem.simulator.base.saved_values import FileForm, SavedValue
from stratagem.simulator.hardware.collective_kinds import KindFigures
from stratagem.simulator.hardware.device_type import DeviceType


@dataclass(frozen=True)
class GroupFigures:
    """Ring bandwidth and latency per message that collectives of groups of `size` showed.

    A collective is cut into pieces that follow one another; `piece_us` is what one more piece
    costs, which is why the bandwidth is reached so slowly as messages grow (see
    `collective_times`).

    `wait` is how long members wait for the last of them before they meet, as a share of their mean
    computing since they met before (0.1: a tenth). Each is a little slower one time, a little
    faster another; the mean of the slowest grows with the members (Agarwal et al. 2005, HiPC).

    `by_kind` has figures of kinds of collectives that go by others than all together.

    `later` is how many times as long latencies are of those whose result nobody needs until later,
    such as sums of gradients: who computes meanwhile does not wait for threads to wake.

    `relative_error` is how far times of collectives may be off (one standard deviation); 0 where
    the figures say nothing of it.
    """

    size: int
    bandwidth_gb_s: float
    latency_us: float
    piece_us: float = 0.0
    wait: float = 0.0
    by_kind: tuple[KindFigures, ...] = ()
    later: float = 1.0
    relative_error: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, "by_group_size")
        if self.size < 2:
            raise ValueError(f"by_group_size: size is {self.size}; a group has at least 2 members")
        where = f"by_group_size of {self.size}"
        _link_figures(where, self.bandwidth_gb_s, self.latency_us)
        for name in ("piece_us", "wait", "later", "relative_error"):
            if getattr(self, name) < 0:
                raise ValueError(f"{where}: {name} is {getattr(self, name)}; it must be ≥ 0")
        kinds = [each.kind for each in self.by_kind]
        if len(set(kinds)) < len(kinds):
            raise ValueError(f"{where}: by_kind lists a kind of collective twice; list each once")


@dataclass(frozen=True)
class Link:
    """A class of link: ring bandwidth in GB/s (10⁹ bytes) and latency per message in µs.

    Inside a node `bandwidth_gb_s` is what one device can send; between nodes it is what one *node*
    can send over its `num_cards` network cards, shared by its devices, of which one alone reaches
    one card. `by_group_size` are the figures of collectives by the number of members (between
    nodes: of nodes) where they depend on it; messages between two devices keep the others.
    `shares_compute` says that a transfer keeps the device's cores busy (true of CPU processes), so
    that it cannot overlap with computing. `relative_error` is how far times of messages may be
    off (one standard deviation); 0 where the figures say nothing of it.

    Example:
        >>> pairs, eights = GroupFigures(2, 40.0, 10.0), GroupFigures(8, 120.0, 4.0)
        >>> link = Link("NVLink", 40.0, 10.0, by_group_size=(pairs, eights))
        >>> link.at(4)
        (7e-06, 80000000000.0, 0.0)

    Raises:
        ValueError: on a bandwidth or a number of cards that is not above 0, a latency or an error
            below 0, or group sizes that do not ascend.
    """

    name: str
    bandwidth_gb_s: float
    latency_us: float
    shares_compute: bool = False
    num_cards: int = 1
    by_group_size: tuple[GroupFigures, ...] = ()
    relative_error: float = 0.0

    def __post_init__(self) -> None:
        where = f"link {self.name!r}"
        check_fields(self, where)
        _positive(where, num_cards=self.num_cards)
        if not self.relative_error >= 0:
            raise ValueError(
                f"{where}: relative_error is {self.relative_error}; it must be 0 or more"
            )
        _link_figures(where, self.bandwidth_gb_s, self.latency_us)
        for smaller, larger in pairwise(self.by_group_size):
            if larger.size <= smaller.size:
                raise ValueError(
                    f"{where}: by_group_size lists size {larger.size} after {smaller.size}; list "
                    "each size once, smallest first"
                )

    def at(self, size: int) -> tuple[float, float, float]:
        """Seconds per message, bytes per second and seconds per piece in groups of `size`.

        Between two listed sizes they are linear in the logarithm of the size; beyond the listed
        ones they stay as at the nearest.
        """
        if not self.by_group_size:
            return self.latency_us * 1e-6, self.bandwidth_gb_s * 1e9, 0.0
        low, high, share = self._around(size)
        latency = low.latency_us + share * (high.latency_us - low.latency_us)
        bandwidth = low.bandwidth_gb_s + share * (high.bandwidth_gb_s - low.bandwidth_gb_s)
        piece = low.piece_us + share * (high.piece_us - low.piece_us)
        return latency * 1e-6, bandwidth * 1e9, piece * 1e-6

    def slowed(self, factor: float, *, latencies: bool = True) -> Link:
        """The link on which bytes take `factor` times as long, and `latencies` too if they are to.

        How long members wait for each other stays.

        Example:
            >>> slow = Link("NVLink", 40.0, 10.0).slowed(2.0)
            >>> slow.bandwidth_gb_s, slow.latency_us, slow.slowed(0.5, latencies=False).latency_us
            (20.0, 20.0, 20.0)

        Raises:
            ValueError: if the factor is not above 0.
        """
        if factor <= 0:
            raise ValueError(
                f"link {self.name!r}: a factor of {factor} on its times; it must be > 0"
            )
        late = factor if latencies else 1.0
        groups = tuple(
            replace(
                group,
                bandwidth_gb_s=group.bandwidth_gb_s / factor,
                latency_us=group.latency_us * late,
                piece_us=group.piece_us * late,
                by_kind=tuple(
                    replace(
                        each,
                        latency_us=each.latency_us * late,
                        bandwidth_gb_s=each.bandwidth_gb_s / factor,
                    )
                    for each in group.by_kind
                ),
            )
            for group in self.by_group_size
        )
        bandwidth, latency = self.bandwidth_gb_s / factor, self.latency_us * late
        return replace(self, bandwidth_gb_s=bandwidth, latency_us=latency, by_group_size=groups)

    def wait(self, size: int) -> float:
        """Share of their computing that members of groups of `size` wait for each other.

        Between listed sizes as for `at`, and never less than in smaller groups; nobody waits in a
        group of one.
        """
        if size < 2 or not self.by_group_size:
            return 0.0
        low, high, share = self._around(size)
        before = [each.wait for each in self.by_group_size if each.size <= low.size]
        least = max(before)
        return least + share * max(high.wait - least, 0.0)

    def nearest(self, size: int) -> GroupFigures | None:
        """What is listed of groups of the nearest size; None where nothing is."""
        if not self.by_group_size:
            return None
        low, high, share = self._around(size)
        return low if share < 0.5 else high

    def _around(self, size: int) -> tuple[GroupFigures, GroupFigures, float]:
        """The listed groups below and above a size, and how far it is from one to the other."""
        points = self.by_group_size
        after = bisect_left(points, size, key=lambda point: point.size)
        low, high = points[max(after - 1, 0)], points[min(after, len(points) - 1)]
        span = math.log(high.size / low.size)
        share = min(math.log(size / low.size) / span, 1.0) if span and size > low.size else 0.0
        return low, high, share


SPREAD = 0.25
"""How far the calibrations of clusters are apart: steps of one without are off by as much."""
SAME_UNITS = {"H200": "H100"}
"""Chips whose matrix units are those of another one."""
NOT_CALIBRATED = "not calibrated"
"""Said with figures of clusters on which nobody has measured steps."""


@dataclass(frozen=True)
class Calibration:
    """How kernels in training on a cluster differ from the same kernels timed alone.

    Clocks sink under lasting load, frameworks leave gaps, hosts differ. Matrix products and fused
    attention take `product_scale` times as long as the device model says, everything else
    `memory_scale` times; kernels that were timed on the device take what they took. `launch_us` is
    what the host takes to launch a kernel: it launches one after the other and runs ahead of the
    device, which waits for it where kernels are small. With 0 no kernel is faster than its own
    launch on the device says. `reserved_gib` of a device's memory are taken by communicators and
    fragments, beside what the device says.

    `stall_us` is what a host loses on average for each collective that it launches, while the
    threads that serve the network keep its processor busy: all through a step where stages on
    several nodes exchange tensors, hardly at all where the network is used at its end. The members
    of a group lose time one now, another then, and all wait for whoever is late, so that what is
    lost grows with the members (noise of the system: Petrini et al. 2003, SC'03; Hoefler et al.
    2010, SC'10). Only some stacks do so: what a framework is known for is in a preset of its own.

    `relative_error` is how far steps on the cluster may be off beside the errors of kernels. Left
    out it is 0 where constants are given, as they were fitted to steps, and `SPREAD` where none
    are; a cluster that has some from another one of the same chip states it.

    Example:
        >>> Calibration(product_scale=1.05).scale(matmul=True)
        1.05
        >>> Calibration(product_scale=1.05).spread, Calibration().spread
        (0.0, 0.25)

    Raises:
        ValueError: on a scale that is not above 0, or a negative time or error.
    """

    product_scale: float = 1.0
    memory_scale: float = 1.0
    launch_us: float = 0.0
    reserved_gib: float = 0.0
    stall_us: float = 0.0
    relative_error: float | None = None

    def __post_init__(self) -> None:
        check_fields(self, "calibration")
        _positive("calibration", product_scale=self.product_scale, memory_scale=self.memory_scale)
        for name in ("launch_us", "reserved_gib", "stall_us"):
            if getattr(self, name) < 0:
                raise ValueError(
                    f"calibration: {name} is {getattr(self, name)}; it must be 0 or more"
                )
        if self.relative_error is not None and not self.relative_error >= 0:
            raise ValueError(
                f"calibration: relative_error is {self.relative_error}; it must be 0 or more"
            )

    @property
    def spread(self) -> float:
        """How far steps may be off beside the errors of kernels; 0 where steps were fitted."""
        if self.relative_error is not None:
            return self.relative_error
        fitted = self.product_scale, self.memory_scale, self.launch_us
        return SPREAD if fitted == (1.0, 1.0, 0.0) else 0.0

    def on(self, device: DeviceType, before: Sequence[DeviceType]) -> Calibration:
        """What is known where devices take the place of those that steps were measured on.

        Everything if they are the same chip, whatever its memory. Else how long products take, if
        they multiply by the same units, and what communicators take.
        """
        chip = _chip(device)
        if all(_chip(each) == chip for each in before):
            return self
        units = {SAME_UNITS.get(each, each) for each in (chip, *map(_chip, before))}
        return Calibration(
            product_scale=self.product_scale if len(units) == 1 else 1.0,
            reserved_gib=self.reserved_gib,
            relative_error=SPREAD,
        )

    def scale(self, *, matmul: bool) -> float:
        """How much longer a kernel takes: one on matrix units, or another."""
        return self.product_scale if matmul else self.memory_scale

    def device(self, device: DeviceType, scale: float) -> DeviceType:
        """The device whose times, `scale` times as long, heed the host's launches.

        Where launches are tasks of their own, no kernel waits for its own launch.
        """
        launch = 0.0 if self.launch_us else device.launch_us / scale
        return device if launch == device.launch_us else device.launched(launch)


def _chip(device: DeviceType) -> str:
    """What stands before the size of the memory in a name: the A100 of A100-40GB."""
    return device.name.partition("-")[0]


CLUSTER_FORM = FileForm(version=1, remedy="write the cluster file again")


@dataclass(frozen=True)
class Cluster(SavedValue):
    """Equal-sized nodes of devices, device `i` on node ``i // devices_per_node``.

    Example:
        >>> Cluster.preset("dgx-a100", num_nodes=2).num_devices
        16

    `node_devices` names the device type of each node, so one cluster may mix several.
    `calibration` says how kernels in training differ from kernels alone. While a device takes part
    in a collective, its computing takes `compute_slowdown` longer (0.13: 1.13 times as long),
    because both use its memory and its processors. `node_price_per_hour` is what renting a node
    costs, in any currency.

    Raises:
        ValueError: on sizes below 1, a slow-down below 0, a node whose device type is not
            described, or one of whose memory all is reserved.
    """

    FILE: ClassVar[str] = "cluster file"

    name: str
    devices_per_node: int
    node_devices: tuple[str, ...]
    device_types: tuple[DeviceType, ...]
    intra_node: Link
    inter_node: Link
    compute_slowdown: float = 0.0
    calibration: Calibration = field(default_factory=Calibration)
    node_price_per_hour: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self, f"cluster {self.name!r}")
        if not 0 <= self.node_price_per_hour < math.inf:
            raise ValueError(
                f"cluster {self.name!r}: node_price_per_hour is {self.node_price_per_hour}; it "
                "must be 0 (not priced) or more, in any currency"
            )
        if not 0 <= self.compute_slowdown < math.inf:
            raise ValueError(
                f"cluster {self.name!r}: compute_slowdown is {self.compute_slowdown}; it must be "
                "0 (none) or more, such as 0.13 for computing that takes 1.13 times as long"
            )
        if not self.node_devices:
            raise ValueError(f"cluster {self.name!r} has 0 nodes; it needs at least 1")
        _positive(f"cluster {self.name!r}", devices_per_node=self.devices_per_node)
        _check_size(self.name, self.num_nodes, self.devices_per_node)
        for node, kind in enumerate(self.node_devices):
            if kind not in self._types:
                known = ", ".join(self._types)
                raise ValueError(
                    f"cluster {self.name!r}: node {node} has device type {kind!r}, but only "
                    f"{known} is described in device_types"
                )
        for kind in dict.fromkeys(self.node_devices):
            self._check_room(self._types[kind])

    def _check_room(self, device: DeviceType) -> None:
        kept = device.reserved_gib + self.calibration.reserved_gib
        if device.memory_gib <= kept:
            raise ValueError(
                f"cluster {self.name!r}: nothing is left of the {device.memory_gib:g} GiB of "
                f"{device.name!r}, of which the device keeps {device.reserved_gib:g} and the "
                f"calibration {self.calibration.reserved_gib:g} GiB for other things: set "
                "memory_gib, or the reserved_gib of either"
            )

    def __repr__(self) -> str:
        kinds = " and ".join(dict.fromkeys(self.node_devices))
        nodes = f"{self.num_nodes} node{'s' if self.num_nodes > 1 else ''}"
        return f"<Cluster {self.name!r}: {nodes} of {self.devices_per_node} {kinds}>"

    @cached_property
    def _types(self) -> dict[str, DeviceType]:
        return {device.name: device for device in self.device_types}

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.node_devices)

    @property
    def price_per_hour(self) -> float:
        """What all nodes cost an hour; 0 where they have no price."""
        return self.num_nodes * self.node_price_per_hour

    @property
    def num_devices(self) -> int:
        """Number of devices."""
        return self.num_nodes * self.devices_per_node

    def node_of(self, device: int) -> int:
        """The node that device number `device` is on."""
        return device // self.devices_per_node

    def device_type(self, device: int) -> DeviceType:
        """The type of device number `device`."""
        return self._types[self.node_devices[self.node_of(device)]]

    @classmethod
    def preset(
        cls, name: str, *, num_nodes: int | None = None, devices_per_node: int | None = None
    ) -> Cluster:
        """A bundled cluster, its number of nodes and of devices per node set anew if given.

        Raises:
            ValueError: on an unknown name, or a size below 1.
        """
        known = preset_names()
        check_type(name, str, "cluster preset")
        if name not in known:
            raise unknown("cluster preset", name, known)
        return _bundled(name).resized(num_nodes=num_nodes, devices_per_node=devices_per_node)

    def to_json(self) -> str:
        """The text of a cluster file: the fields of this class, and its version.

        Example:
            >>> cluster = Cluster.preset("dgx-a100")
            >>> Cluster.from_json(cluster.to_json()) == cluster
            True
        """
        return encode({**CLUSTER_FORM.head, **msgspec.to_builtins(self, enc_hook=plain_number)})

    @classmethod
    def from_json(cls, text: str, *, what: str | None = None) -> Cluster:
        """Read the text of a cluster file (JSON; fields as in this class).

        An entry of `device_types` may be the name of a bundled device instead of a description;
        the version may be left out.

        Raises:
            ValueError: names the file, the field and what was expected.
        """
        what = what or "cluster"
        CLUSTER_FORM.check(text, what)
        found = decode(_with_bundled_devices(text, what), cls, what)
        found.check_figures(what)
        return found

    def check_figures(self, what: str) -> None:
        """Refuse figures of hardware that nothing can be computed with, such as 1e308 GiB.

        Raises:
            ValueError: names the file, the field and its value.
        """
        check_numbers(msgspec.to_builtins(self), what, least=1e-9, most=1e9)

    def resized(
        self, *, num_nodes: int | None = None, devices_per_node: int | None = None
    ) -> Cluster:
        """The same hardware in another number; all nodes are then like the first."""
        nodes = self.num_nodes if num_nodes is None else num_nodes
        per_node = self.devices_per_node if devices_per_node is None else devices_per_node
        _check_size(self.name, nodes, per_node)
        kinds = self.node_devices if num_nodes is None else (self.node_devices[0],) * nodes
        return replace(self, node_devices=kinds, devices_per_node=per_node)

    def with_devices(self, num_devices: int, *, device: DeviceType | None = None) -> Cluster:
        """The same hardware with `num_devices`: whole nodes, or part of one; perhaps another type.

        Where that is another chip, nobody has measured steps on such a cluster: it is not
        calibrated, and of the constants it has those of the chip, if any (see `Calibration.on`).

        Example:
            >>> Cluster.preset("dgx-a100").with_devices(4).num_nodes
            1
            >>> h200 = Cluster.preset("dgx-h200").device_type(0)
            >>> Cluster.preset("a100-800g").with_devices(16, device=h200).calibration.spread
            0.25

        Raises:
            ValueError: more than one node, and not a whole number of them.
        """
        per_node = min(num_devices, self.devices_per_node)
        if num_devices < 1 or num_devices % per_node:
            raise ValueError(
                f"{num_devices} devices are no whole number of nodes of cluster {self.name!r}, "
                f"which have {self.devices_per_node}"
            )
        sized = self.resized(num_nodes=num_devices // per_node, devices_per_node=per_node)
        if device is None:
            return sized
        return replace(
            sized,
            node_devices=(device.name,) * sized.num_nodes,
            device_types=(device,),
            calibration=sized.calibration.on(device, sized.device_types),
        )


def _check_size(name: str, nodes: int, per_node: int) -> None:
    check_arguments(f"cluster {name!r}", num_nodes=(nodes, int), devices_per_node=(per_node, int))
    if nodes < 1 or per_node < 1:
        raise ValueError(
            f"cluster {name!r}: num_nodes={nodes}, devices_per_node={per_node}; "
            f"both must be at least 1"
        )
    if nodes * per_node > MOST_DEVICES:
        raise ValueError(
            f"cluster {name!r}: {nodes} nodes of {per_node} devices are {nodes * per_node:,}, and "
            f"at most {MOST_DEVICES:,} can be planned for; take fewer"
        )


MOST_DEVICES = 2**17
"""Of a cluster, as many as the largest that there are."""


def _with_bundled_devices(text: str, what: str) -> str:
    """The fields alone, with the names of bundled devices replaced by their descriptions."""
    try:
        given = msgspec.json.decode(text)
    except (msgspec.MsgspecError, ValueError):
        return text  # whoever decodes it says what is wrong
    if not isinstance(given, dict):
        return text
    given.pop("version", None)
    kinds = given.get("device_types")
    if not isinstance(kinds, list):
        return msgspec.json.encode(given).decode()
    try:
        described = [
            msgspec.to_builtins(DeviceType.preset(kind)) if isinstance(kind, str) else kind
            for kind in kinds
        ]
    except ValueError as error:
        raise ValueError(f"{what} is broken: {error}, or describe it in device_types") from error
    return msgspec.json.encode({**given, "device_types": described}).decode()


@cache
def preset_names() -> tuple[str, ...]:
    """Names of the bundled clusters."""
    folder = resources.files(__package__) / "presets"
    return tuple(sorted(p.name.removesuffix(".json") for p in folder.iterdir()))


@cache
def _bundled(name: str) -> Cluster:
    """A bundled cluster as its file says; it is read once, and nobody can change it."""
    text = (resources.files(__package__) / "presets" / f"{name}.json").read_text("utf-8")
    return decode(_with_bundled_devices(text, name), Cluster, f"preset {name}")


def _link_figures(where: str, bandwidth_gb_s: float, latency_us: float) -> None:
    _positive(where, bandwidth_gb_s=bandwidth_gb_s)
    if latency_us < 0:
        raise ValueError(f"{where}: latency_us is {latency_us}; it must be ≥ 0")


def _positive(what: str, **fields: float) -> None:
    for name, value in fields.items():
        if not value > 0:
            raise ValueError(f"{what}: {name} is {value}; it must be above 0")
