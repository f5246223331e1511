"""What is looked at: in a real browser, and by a real Prometheus. ``make test-ui`` runs these."""
