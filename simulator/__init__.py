"""What a plan's step takes and holds: from operators to the predicted timeline.

Rooms are in the order that data flows: `base`, `operators`, `graph`, `hardware`, `sharding`,
`kernel_times`, `pricing`, `engine`, `timeline`, `schedules`, `stage`, `plan`, `pipeline`,
`simulation`, `drawing`; beside them `torch_ops`, the only room that imports torch.
"""
