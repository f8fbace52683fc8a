"""The schema of the journal, forward only."""
