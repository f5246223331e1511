"""Figures: the package beside vLLM's own offloading, beside the machine, beside itself at rest.

``python -m bench`` runs all of them; ``docs/bench.md`` says what each line means.
"""
