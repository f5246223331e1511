"""Accelerator <-> host bytes, on the worker side; the only home of torch outside ``engines``."""
