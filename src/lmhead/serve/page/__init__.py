"""The explorer: one page in the browser, answered by one model on this machine."""
