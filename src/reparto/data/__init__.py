"""Stage 2, L3: text to documents to tokens to samples, in an order that is a pure function."""
