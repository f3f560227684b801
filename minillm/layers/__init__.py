"""The parts of a layer: attention, its tiles in plain torch, and the operations per token."""
