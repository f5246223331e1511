"""The primary tier: chunks in host memory, one slot each, as a cache with its own policy."""
