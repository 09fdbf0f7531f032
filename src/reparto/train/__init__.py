"""Stages 2 and 4, L6: state, optimizer, step, loop."""
