"""Real servers on loopback, each with ports and a folder of its own, gone after the session."""
