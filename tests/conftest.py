"""What every test shares. The time limit and the warning filter are in pyproject.toml."""
