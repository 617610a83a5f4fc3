"""One training step under fake tensors: bytes over time, and work, without the device and without the memory."""
