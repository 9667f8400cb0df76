"""Plans for the trainers of other frameworks, one module each."""
