"""One module per revision: tables, then views."""
