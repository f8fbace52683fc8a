"""The command line and the development tools."""
