"""What every test shares. The warning filter and the time limit are in pyproject.toml."""

from hypothesis import settings

# The time limit of a test is pytest's; a limit for each example would fail on a busy machine.
settings.register_profile("fermata", deadline=None, print_blob=True)
settings.load_profile("fermata")
