"""Stage 5, L7: detect, decide, supervise, inject."""
