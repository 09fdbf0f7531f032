"""Stage 1, L1: who owns what. Pure index arithmetic and byte counts. No torch."""
