"""What a `Cluster` is made of, and the meshes that its devices are put in.

sg.hardware.DeviceType.preset("A100-80GB").memory
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from stratagem.basics.names_on_demand import names_on_demand

if TYPE_CHECKING:
    from stratagem.face.verbs import fit_links as fit_links
    from stratagem.simulator.hardware.cluster import Link as Link
    from stratagem.simulator.hardware.device_mesh import DeviceMesh as DeviceMesh
    from stratagem.simulator.hardware.device_mesh import MeshAxis as MeshAxis
    from stratagem.simulator.hardware.device_type import DeviceType as DeviceType
    from stratagem.simulator.hardware.headroom import Headroom as Headroom
else:
    __all__, __getattr__, __dir__ = names_on_demand(__name__)
