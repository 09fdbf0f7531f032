"""Stage 4, L4: one strategy, one file; `compose` is the only file that sees them all."""
