"""The top: one file a verb; the only place that wires rooms together."""
