"""Beside the stages: records, ledger, provenance, guards, claims. No torch."""
