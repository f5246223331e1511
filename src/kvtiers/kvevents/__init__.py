"""KV-cache events as engines publish them: what they say, and how they travel."""
