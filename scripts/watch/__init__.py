"""Watch runs: a table in the terminal, or a page on localhost."""
