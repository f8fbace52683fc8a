"""The record of every fact and decision, in SQLite."""
