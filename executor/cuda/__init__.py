"""What runs on CUDA devices only: streams and events, kernels, and their sources.

CuPy is imported when something here is first used, never before.

In:      tensors on a GPU.
Out:     the same through CuPy and NCCL, in order.
Imports: communication, the simulator.
"""
