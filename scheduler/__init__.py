"""The pure core that decides, and the shell that performs."""
