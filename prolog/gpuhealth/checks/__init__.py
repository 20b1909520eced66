"""The checks themselves, one module for what is looked at together."""
