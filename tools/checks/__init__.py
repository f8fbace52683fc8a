"""The rules of the gate that no ready-made tool knows, one idea a module."""
