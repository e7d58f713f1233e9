"""The page pool: pages of bytes on the device and in pinned host memory, allocated by the device."""
