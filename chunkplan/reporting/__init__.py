"""What a plan, a step or an analysis comes to, as numbers and as a page: what `inspect` and `diff` show."""
