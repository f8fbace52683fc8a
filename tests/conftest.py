"""What every test shares. The warning filter and the time limit are in pyproject.toml."""

import pytest
from hypothesis import settings

# The time limit of a test is pytest's; a limit for each example would fail on a busy machine.
settings.register_profile("fermata", deadline=None, print_blob=True)
settings.load_profile("fermata")


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--rewrite` writes the golden scenario files anew, for their difference to be reviewed."""
    parser.addoption("--rewrite", action="store_true", help="rewrite golden scenario files")
