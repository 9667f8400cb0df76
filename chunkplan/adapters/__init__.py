"""Drop-in functions for other frameworks, one module each; none of these is imported before its module is used."""
