"""Decisions only: no I/O, no threads, no clock, no engine."""
