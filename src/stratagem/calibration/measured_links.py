"""Links of a cluster as they are: measured on this machine now, or fitted to kept collectives."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch

from stratagem.calibration.executor_measurements import (
    LOOPBACK,
    executor_launch,
    measure_collectives,
)
from stratagem.executor.cuda.own_gpu import check_gpus
from stratagem.profiler.cache.timing_cache import TimingCache
from stratagem.profiler.machine.device_clocks import describe_environment
from stratagem.profiler.timing.collective_fits import CollectiveFit, fit_collectives, fit_link
from stratagem.profiler.timing.kept_collectives import (
    LinkCases,
    are_as_before,
    keep_collectives,
    kept_collectives,
)
from stratagem.profiler.timing.link_fits import FittedLinks, fitted_links
from stratagem.simulator.base.tables import Table, Unit
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_type import DeviceType, device_names
from stratagem.simulator.plan.provenance import ProcessBackend


@dataclass(frozen=True, eq=False)
class MeasuredCluster:
    """A cluster with its link in a node as measured here, and how the collectives were fitted."""

    cluster: Cluster
    fits: tuple[CollectiveFit, ...] = ()

    @property
    def table(self) -> Table:
        """The fits, a row for each kind of collective and size of group."""
        return Table(
            title=f"collectives of this machine over {self.cluster.intra_node.name}",
            columns={
                "collective": Unit.TEXT,
                "ranks": Unit.COUNT,
                "latency": Unit.SECONDS,
                "GB/s": Unit.TEXT,
                "error": Unit.SHARE,
            },
            rows=tuple(
                (f.kind.value, f.size, f.latency_us * 1e-6, f"{f.bandwidth_gb_s:.2f}", f.error)
                for f in self.fits
            ),
            note="Latency a message and bandwidth of the ring model; errors are typical ones of "
            "the timed sizes.",
        )


def measured_links(
    cluster: Cluster, *, cache: str | Path | None = None, anew: bool = True
) -> MeasuredCluster:
    """`cluster` with the link in a node as measured between devices of this machine now.

    With GPUs, so is what the host takes to launch a kernel. All else stays as it is given, the
    link between nodes too, of which one machine shows nothing. A single device has no link.

    Args:
        cluster: of one device type, CPUs or the GPU of this machine.
        cache: the timing cache that keeps the times of the collectives.
        anew: whether all of them are measured; if not, a few are, and those that are kept count
            where these are as before.

    Raises:
        ValueError: as `device_here` does.
        RuntimeError: when this machine has fewer GPUs than a node of the cluster, or NCCL is
            missing.
    """
    backend = check_links(cluster)
    count, given = cluster.devices_per_node, cluster.intra_node
    if backend == "nccl":
        cluster = measured_host(cluster)
    if count == 1:
        return MeasuredCluster(cluster)
    on_cpu = backend == "gloo"
    name = LOOPBACK if on_cpu else given.name
    device, load = ("cpu", count - 1) if on_cpu else ("cuda", 0)
    environment = describe_environment(device, load=load)
    with TimingCache(cache) as kept:
        asked = LinkCases.of_all(count, backend)
        find = partial(kept_collectives, kept, environment, asked, backend, link=name)
        timings = None if anew else find()
        if timings is None or not are_as_before(
            timings, measure_collectives(count, backend=backend, few=True)
        ):
            measured = measure_collectives(count, backend=backend)
            keep_collectives(kept, environment, measured, backend, link=name)
            timings = find() or measured  # A later call finds the same cluster, to the last bit.
    link = replace(fit_link(timings, name, shares_compute=on_cpu), num_cards=given.num_cards)
    return MeasuredCluster(replace(cluster, intra_node=link), tuple(fit_collectives(timings)))


def measured_host(cluster: Cluster) -> Cluster:
    """`cluster` with what this machine's host takes to launch a kernel on its GPU."""
    known = cluster.calibration
    launch_us = 1e6 * executor_launch("cuda")
    return replace(
        cluster,
        calibration=replace(known, launch_us=launch_us, relative_error=known.spread),
    )


def check_links(cluster: Cluster) -> ProcessBackend:
    """What measures the link in a node of `cluster` here.

    Raises:
        ValueError, RuntimeError: as `measured_links` does.
    """
    _, device = device_here(cluster)
    if device == "cpu":
        return "gloo"
    check_gpus(cluster.devices_per_node)
    return "nccl"


def links_from_cache(cluster: Cluster, *, cache: str | Path | None = None) -> FittedLinks:
    """`cluster` with its links as the collectives in the timing cache show them.

    Raises:
        ValueError: as `fitted_links` does.
    """
    one_type(cluster)
    with TimingCache(cache) as kept:
        return fitted_links(cluster, kept.collective_entries())


def device_here(cluster: Cluster) -> tuple[DeviceType, str]:
    """The device type of a cluster, and what torch calls a device of this type.

    Raises:
        ValueError: when it has several, or a GPU that is not the one of this machine.
    """
    kind = one_type(cluster)
    if kind.is_cpu:
        return kind, "cpu"
    if not torch.cuda.is_available():
        raise ValueError(
            f"device type {kind.name!r} cannot be profiled: torch finds no CUDA device here; use "
            "the device model (no costs), or profile on a machine that has it"
        )
    here = torch.cuda.get_device_name(torch.device("cuda"))
    if not kind.is_called(here):
        own = [name for name in device_names() if DeviceType.preset(name).is_called(here)]
        hint = f"a cluster of {own[0]} devices" if own else "a cluster whose type it is"
        raise ValueError(
            f"device type {kind.name!r} cannot be profiled: the GPU here is {here!r}, whose times "
            f"are not those of {', '.join(kind.torch_names) or kind.name}; give {hint}, or, if it "
            f"is one of this type, name it in torch_names of the type in the cluster's file"
        )
    return kind, "cuda"


def one_type(cluster: Cluster) -> DeviceType:
    """The device type of a cluster that has but one.

    Raises:
        ValueError: when it has several.
    """
    kinds = sorted(set(cluster.node_devices))
    if len(kinds) > 1:
        raise ValueError(
            f"cluster {cluster.name!r} has the device types {', '.join(kinds)}; this machine can "
            f"profile one: give a cluster of that one only"
        )
    return cluster.device_type(0)
