"""One way to write a mesh: what differs in names only, or in axes of one device, is the same."""

from __future__ import annotations

from dataclasses import replace

from stratagem.searcher.space.choices import Choices
from stratagem.searcher.space.skeletons import Skeleton, axes_of, stage_meshes
from stratagem.simulator.hardware.cluster import Cluster
from stratagem.simulator.hardware.device_mesh import DeviceMesh


def canonical(skeleton: Skeleton, choices: Choices, cluster: Cluster) -> tuple[Skeleton, Choices]:
    """The same plan on meshes as the search lists them.

    Axes of one device are dropped, and with them what choices say of them; a mesh of a shape that
    is listed (see `stage_meshes`) has the axes' names from there.

    Example:
        >>> from stratagem.searcher.space.strategies import data_parallel
        >>> from stratagem.simulator.hardware.device_mesh import MeshAxis
        >>> from stratagem.simulator.graph.models import mlp
        >>> graph, cluster = mlp([8, 8], batch=16), Cluster.preset("dgx-a100")
        >>> mesh = DeviceMesh((MeshAxis("data", 16), MeshAxis("tensor", 1)), tuple(range(16)))
        >>> plain = Skeleton((graph.names,), (mesh,), 1, "1f1b")
        >>> found, _ = canonical(plain, data_parallel(graph, mesh.shape), cluster)
        >>> print(plain, "is", found)
        1 stage on 16×1, whole batch is 1 stage on 16, whole batch

    Args:
        skeleton: of a plan.
        choices: of the plan, by operator.
        cluster: where it runs.
    """
    kept = [_wide_axes(mesh) for mesh in skeleton.meshes]
    meshes = [
        _named(mesh, axes, cluster) for mesh, axes in zip(skeleton.meshes, kept, strict=True)
    ]
    made = {
        name: replace(choices[name], config=tuple(choices[name].config[k] for k in axes))
        for names, axes in zip(skeleton.stages, kept, strict=True)
        for name in names
    }
    return replace(skeleton, meshes=tuple(meshes)), made


def _wide_axes(mesh: DeviceMesh) -> list[int]:
    """The axes of more than one device; the first of a mesh that has none."""
    return [k for k, ways in enumerate(mesh.shape) if ways > 1] or [0]


def _named(mesh: DeviceMesh, kept: list[int], cluster: Cluster) -> DeviceMesh:
    shape = tuple(mesh.shape[k] for k in kept)
    for listed in stage_meshes(mesh.devices, cluster, max_axes=axes_of(cluster)):
        if listed.shape == shape:
            return listed
    return replace(mesh, axes=tuple(mesh.axes[k] for k in kept))
