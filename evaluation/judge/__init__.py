"""The judge: programs run in a cage, verdicts are made outside of it."""
