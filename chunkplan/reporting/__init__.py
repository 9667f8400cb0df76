"""Reports on plans, steps and analyses, as numbers and as a page: what `inspect` and `diff` show."""
